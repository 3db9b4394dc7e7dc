"""HTTP to one vLLM server: token ids in and out, nothing left to a server's defaults.

Errors say what may be done about them: Unreachable and Busy calls were not sampled and may be sent again, anywhere; a
call that is Lost may have been.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx2

from whale_tui.policy.protocol import PolicyFailure, Sampled, SampleRequest
from whale_tui.records import Sampling

_GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0)
SHORT_SECONDS = 10.0
"""Time for an answer that needs no sampling."""
RESETS = 20
"""Times that a reset of the prefix cache is asked for while blocks are held, a tenth of a second apart at first."""


class Unreachable(Exception):
    """No connection: the server never had the request."""


class Busy(Exception):
    """The server refused for now (429, 503, or a call that it aborted). `after`: seconds it asks to wait, 0 if none."""

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.after = after


class Lost(Exception):
    """The connection broke, or the time was up, after the server had the request."""


class Refused(Exception):
    """The server understood and said no; the same request would fail again."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(f"HTTP {status}: {why}")
        self.status = status


class Client:
    """url: of the server, without a path. seconds: longest wait for one sampled call. key: sent as a bearer token."""

    def __init__(self, url: str, *, seconds: float, key: str = "", connections: int = 1024) -> None:
        self.url, self.seconds = url.rstrip("/"), seconds
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # An idle connection is dropped before the server (after 5 s) does it under a request.
            limits=httpx2.Limits(max_connections=connections + 8, keepalive_expiry=3.0),
            timeout=httpx2.Timeout(seconds, connect=SHORT_SECONDS, pool=None),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    # ------------------------------------------------------------------------------------------------------- sampling

    async def sample(self, model: str, salt: str, request: SampleRequest) -> Sampled:
        """One call to a loaded model by name. Raises Unreachable, Busy, Lost, Refused; PolicyFailure where the answer
        is not for what was asked."""
        body = await self.post("/v1/completions", sampling_body(model, salt, request))
        return read_sampled(body, request)

    async def probe(self, model: str, salt: str, ids: list[int]) -> list[float]:
        """Log-probability of each id after the first, [len(ids) - 1], before any sampling setting."""
        request = SampleRequest((0, 0), ids, 1, 0, _GREEDY, [])
        body = await self.post("/v1/completions", sampling_body(model, salt, request) | {"prompt_logprobs": 0})
        told = body["choices"][0].get("prompt_logprobs") or []
        if len(told) != len(ids):
            raise PolicyFailure("server-unfit", f"{self.url} gives no log-probabilities of a prompt")
        return [float(each[str(token)]["logprob"]) for token, each in zip(ids[1:], told[1:], strict=True)]

    # ------------------------------------------------------------------------------------------------------- the server

    async def healthy(self) -> bool:
        try:
            return (await self._http.get("/health", timeout=SHORT_SECONDS)).status_code == 200
        except httpx2.HTTPError:
            return False

    async def version(self) -> str:
        return str((await self.get("/version"))["version"])

    async def models(self) -> list[dict[str, Any]]:
        """Base model and adapters: `id`, `root` (the path), `parent` (of adapters), `max_model_len` (of the base)."""
        return list((await self.get("/v1/models"))["data"])

    async def tokenize(self, model: str, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation by the server's own template, ending where the assistant begins to speak."""
        body = {"model": model, "messages": messages, "add_generation_prompt": True, "add_special_tokens": False}
        return list((await self.post("/tokenize", body))["tokens"])

    async def metrics(self) -> str:
        return (await self._ask("GET", "/metrics", None, SHORT_SECONDS)).text

    async def load(self, name: str, path: str) -> None:
        """Load an adapter under a name that the server has not seen. Raises PolicyFailure("publish-unproved")."""
        try:
            await self._ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, self.seconds)
        except Refused as refused:
            why = f"{self.url} can't load {path}: {refused}"
            if refused.status == 404 and "Not Found" in str(refused):
                flags = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                why = f"{self.url} loads no adapters: start it with {flags}"
            raise PolicyFailure("publish-unproved", why) from None
        found = {model["id"]: model.get("root") for model in await self.models()}
        if found.get(name) != path:
            raise PolicyFailure("publish-unproved", f"{self.url} has {found.get(name)} as {name}, not {path}")

    async def unload(self, name: str) -> None:
        """Forget an adapter's name; its memory is freed when another takes its place. Unknown names are no error."""
        try:
            await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, SHORT_SECONDS)
        except Refused as refused:
            if refused.status not in (400, 404):
                raise

    async def reload(self, folder: str) -> bool:
        """Take all weights from a folder's files, in the place of those it has. False where it can't be told to."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        try:
            await self._ask("POST", "/collective_rpc", body, self.seconds)
        except Refused as refused:
            if refused.status in (404, 405):
                return False
            raise
        return True

    async def reset_prefix_cache(self) -> bool:
        """Empty the cache of prefixes. False where the server has no such endpoint, or holds blocks all the while."""
        for attempt in range(RESETS):
            try:
                response = await self._ask("POST", "/reset_prefix_cache", None, SHORT_SECONDS)
            except Refused:
                return False
            # Releases before the field answered 200 with nothing, once it was done.
            if not response.content or response.json() is None or response.json().get("success", True):
                return True
            await asyncio.sleep(min(0.1 * 1.5**attempt, 2.0))
        return False

    async def sleep(self) -> None:
        """Give the GPU's memory back, weights kept in main memory (level 1; level 2 would lose them)."""
        await self._ask("POST", "/sleep?level=1", None, self.seconds)

    async def wake(self) -> None:
        """Weights first, so that both copies of them are never there beside the cache."""
        await self._ask("POST", "/wake_up?tags=weights", None, self.seconds)
        await self._ask("POST", "/wake_up?tags=kv_cache", None, self.seconds)

    # -------------------------------------------------------------------------------------------------------- requests

    async def get(self, path: str) -> Any:
        return (await self._ask("GET", path, None, SHORT_SECONDS)).json()

    async def post(self, path: str, body: Any) -> Any:
        return (await self._ask("POST", path, body, self.seconds)).json()

    async def _ask(self, method: str, path: str, body: Any, seconds: float) -> httpx2.Response:
        try:
            async with asyncio.timeout(seconds):
                response = await self._http.request(method, path, json=body)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            raise Unreachable(f"{self.url}: {error or type(error).__name__}") from None
        except (TimeoutError, httpx2.TimeoutException):
            raise Lost(f"{self.url}{path}: no answer within {seconds:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise Lost(f"{self.url}{path}: {error or type(error).__name__}") from None
        if response.status_code in (429, 503):
            after = response.headers.get("retry-after", "")
            raise Busy(f"{self.url}: HTTP {response.status_code}", float(after) if after.isdigit() else 0.0)
        if response.status_code >= 500:
            raise Lost(f"{self.url}{path}: HTTP {response.status_code}: {response.text[:300].strip()}")
        if response.status_code >= 400:
            raise Refused(response.status_code, response.text[:300].strip())
        return response


def sampling_body(model: str, salt: str, request: SampleRequest) -> dict[str, Any]:
    """The body of /v1/completions, every field that could bend sampling named: a server's defaults take no part.

    Ends of turn are ids (`ignore_eos` keeps the model's own list out); `salt` keeps the prefix cache of one version
    from every other.
    """
    s = request.sampling
    return {
        "model": model, "prompt": request.prompt_ids, "max_tokens": request.max_tokens, "min_tokens": 0, "n": 1,
        "temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": 0.0, "seed": request.seed,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": None,
        "ignore_eos": True, "stop_token_ids": request.stop_ids, "stop": request.stop_strings,
        "include_stop_str_in_output": False, "skip_special_tokens": True, "spaces_between_special_tokens": False,
        "logprobs": 0, "return_token_ids": True, "add_special_tokens": False, "echo": False, "stream": False,
        "cache_salt": salt,
    }  # fmt: skip


def read_sampled(body: Any, request: SampleRequest) -> Sampled:
    """The ids and log-probabilities of an answer. A stop string is cut from its text, and stays in the ids.

    Raises PolicyFailure("server-unfit") where it answers something else, Busy where the server gave the call up.
    """
    try:
        choice = body["choices"][0]
        reason, ids, echoed = choice["finish_reason"], choice["token_ids"], choice["prompt_token_ids"]
        logprobs = choice["logprobs"]["token_logprobs"]
    except (KeyError, IndexError, TypeError):
        raise PolicyFailure(
            "server-unfit", f"an answer without token ids or log-probabilities: {str(body)[:300]}; vLLM 0.11 or newer"
        ) from None
    if reason not in ("stop", "length"):
        raise Busy(f"the server ended the call: {reason}")
    if echoed != request.prompt_ids:
        raise PolicyFailure("server-unfit", f"the server sampled from {len(echoed or [])} other prompt ids")
    if not ids or len(ids) != len(logprobs) or len(ids) > request.max_tokens:
        raise PolicyFailure("server-unfit", f"{len(ids)} ids, {len(logprobs)} log-probabilities")
    if not all(isinstance(p, float | int) and math.isfinite(p) for p in logprobs):
        raise PolicyFailure("not-finite", "the server gave log-probabilities that are not finite")
    return Sampled(output_ids=ids, logprobs=[float(p) for p in logprobs], finish_reason=reason)
