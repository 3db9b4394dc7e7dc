"""The weights half: model sources, chat rendering, sampling, training, publishing.

Only `worker` and the modules it imports load torch; `protocol`, `client` and `chat` belong to the engine's side.
"""
