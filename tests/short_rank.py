"""A training process with little memory: a forward of more than MOST tokens runs out of it, in the second one alone."""

from whale_tui.policy import rank, trainer

MOST = 60


class Short(trainer.Trainer):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)

        def forward(module, args):
            if args[0].numel() > MOST and self.shards.rank == 1:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        self.held.causal.get_input_embeddings().register_forward_pre_hook(forward)


if __name__ == "__main__":
    trainer.Trainer = Short
    rank.main()
