"""A server with the chat interface of OpenAI (vLLM and others have it) writes replies."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..evaluation.prompts import InputError
from .answers import EMPTY, REFUSED, TOO_LONG, Ask, Reply
from .conversations import LENGTH
from .target_writer import Sampling

ATTEMPTS = 6
PASSING = (408, 409, 425, 429, 500, 502, 503, 504)  # statuses that another attempt may mend
OF_THE_ROW = (400, 413, 422)  # statuses that are the conversation's own fault


class EndpointWriter:
    """Replies of a server.

    Args:
        url: Where its interface begins, for instance `http://localhost:8000/v1`.
        model: The name that the server knows the target by.
        template_arguments: Further arguments of the chat template, sent as `chat_template_kwargs` (vLLM, SGLang).
        sampling: How replies are drawn.
        concurrency: How many conversations are asked about at the same time.
        api_key: Sent with each request, if there is one.
        timeout: Seconds to wait for a reply.
        pause: Seconds before the second attempt; twice as many before each further one.
    """

    def __init__(
        self,
        url: str,
        model: str,
        template_arguments: dict[str, Any],
        sampling: Sampling,
        concurrency: int = 32,
        api_key: str | None = None,
        timeout: float = 600.0,
        pause: float = 1.0,
    ):
        self.url = url.rstrip("/") + "/chat/completions"
        self.model = model
        self.template_arguments = template_arguments
        self.sampling = sampling
        self.timeout = timeout
        self.pause = pause
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self.threads = ThreadPoolExecutor(concurrency)

    def reply(self, asks: Sequence[Ask]) -> list[Reply]:
        """A reply to each conversation.

        Raises:
            InputError: if the server cannot be reached, or does not know the model or the request.
        """
        replies = [self.threads.submit(self._reply, ask) for ask in asks]
        try:
            return [reply.result() for reply in replies]
        except BaseException:
            self.threads.shutdown(wait=False, cancel_futures=True)
            raise

    def _reply(self, ask: Ask) -> Reply:
        try:
            answer = self._post(self._request(ask))
        except urllib.error.HTTPError as error:
            detail = _detail(error)
            if error.code in OF_THE_ROW:
                return Reply(failure=TOO_LONG if "length" in detail or "token" in detail else REFUSED, detail=detail)
            raise InputError(f"{self.url} refuses requests: {error.code} {error.reason}. {detail}") from error
        return self._read(answer)

    def _request(self, ask: Ask) -> dict[str, Any]:
        sampling = self.sampling
        request: dict[str, Any] = {
            "model": self.model,
            "messages": ask.messages,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": ask.seed,
        }
        # Not all servers know these.
        if sampling.top_k:
            request["top_k"] = sampling.top_k
        if ask.tools:
            request["tools"] = ask.tools
        if self.template_arguments:
            request["chat_template_kwargs"] = self.template_arguments
        return request

    def _post(self, request: dict[str, Any]) -> Any:
        body = json.dumps(request).encode()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(self.url, body, self.headers), timeout=self.timeout
                ) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                if error.code not in PASSING or attempt == ATTEMPTS:
                    raise
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                if attempt == ATTEMPTS:
                    raise InputError(
                        f"{self.url} does not answer ({error}), after {ATTEMPTS} attempts. Start the server and run the same "
                        "command again: it goes on from here."
                    ) from error
            time.sleep(self.pause * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")

    def _read(self, answer: Any) -> Reply:
        try:
            (choice,) = answer["choices"]
            said, is_cut = choice["message"], choice["finish_reason"] == LENGTH
            tokens = (answer.get("usage") or {}).get("completion_tokens", 0)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{self.url} answers with what is no chat completion: {str(answer)[:80]!r}.") from error
        message = {"role": "assistant", "content": said.get("content") or ""}
        # Servers that take the reasoning out of a reply give it beside it, under one of two names.
        if reasoning := said.get("reasoning_content") or said.get("reasoning"):
            message["reasoning_content"] = reasoning
        if said.get("tool_calls"):
            message["tool_calls"] = said["tool_calls"]
        if not any(str(value).strip() for name, value in message.items() if name != "role"):
            return Reply(failure=EMPTY, num_tokens=tokens)
        return Reply(message, tokens, is_cut)


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return error.read().decode(errors="replace")[:200]
    except OSError:
        return ""
