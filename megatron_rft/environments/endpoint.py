"""The chat endpoint of a rank's programs: OpenAI's and Anthropic's routes over HTTP, a secret for each episode.

Every route becomes a request of /v1/chat/completions (dialects.py), which opens requests for turns of the episode
(program.py). An answer is whole before it is sent, also as a stream. One that no client has received is given to the
next client that asks the same: a retry does not sample again.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, Required

from aiohttp import web
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from megatron_rft.environments import dialects
from megatron_rft.environments.dialects import Dialect
from megatron_rft.environments.program import MODEL, ProgramEpisode, Refused
from megatron_rft.environments.turns import named, plain
from megatron_rft.utils.errors import ConfigError

KEEP_ALIVE_S = 5.0
LARGEST = 64 << 20  # bytes of a request
PASSES = 16  # of the loop: twice as many as from a connection to its request for a turn
# The forms of a request in any dialect, and of what it becomes in that of chat completions; other fields pass.
FORM = partial(TypedDict, "Form", total=False)
UNLESS_TEXT = BeforeValidator(lambda given: [] if isinstance(given, str) else given)
TEXT = Annotated[str, Field(min_length=1)]
ITEMS = list[FORM({"content": Annotated[list[FORM({"text": str | None})], UNLESS_TEXT] | None})]
FIELDS = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "n"), Annotated[int, Field(ge=1)])
FIELDS |= dict.fromkeys(("stop", "stop_sequences"), Annotated[list[TEXT], UNLESS_TEXT]) | {"include": list}
FIELDS |= dict.fromkeys(("stream_options", "text", "output_config"), dict) | {"stream": bool, "logprobs": bool}
FORMS = {"messages": ITEMS, "input": Annotated[ITEMS, UNLESS_TEXT], "tools": list[dict] | None}
REQUEST = TypeAdapter(FORM(FORMS | {name: kind | None for name, kind in FIELDS.items()}))
FUNCTION = FORM({"name": Required[TEXT], "parameters": FORM({"properties": dict | None}) | None})
TOOL = FORM({"type": Literal["function"], "function": Required[FUNCTION]})
MESSAGE = FORM({"role": Required[str], "tool_calls": list[FORM({"function": Required[dict]})] | None})
ASKED = TypeAdapter(FORM({"messages": Required[list[MESSAGE]], "tools": list[TOOL] | None}))
# They change the distribution of the policy, or ask for what the engine does not return. What changes nothing passes.
REFUSED: dict[str, tuple] = {
    **dict.fromkeys(("logit_bias", "logits_processors", "bad_words", "allowed_token_ids", "stop_token_ids"), ({}, [])),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens", "top_logprobs", "ignore_eos"), (0, False)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), ()),
    **dict.fromkeys(("regex", "ebnf", "json_schema", "prompt_logprobs", "truncate_prompt_tokens", "chat_template"), ()),
    **dict.fromkeys(("functions", "documents", "prediction", "audio", "chat_template_kwargs"), ({}, [])),
    **dict.fromkeys(("echo", "use_beam_search", "continue_final_message", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of", "add_generation_prompt"), (1, True)),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
OVERRULED = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed"), "the recipe's sampling counts")
OVERRULED |= dict.fromkeys(("web_search", "web_search_options"), "this server has none: the policy is not told of it")


@dataclass(eq=False)
class Reply:
    """The answer to a request, and the clients that wait for it."""

    task: asyncio.Task
    waiting: list[asyncio.Transport | None] = field(default_factory=list)
    delivered: bool = False
    sent: bool = False

    @property
    def abandoned(self) -> bool:
        return not self.delivered and all(map(gone, self.waiting))

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class Given(dict):  # an object of a request
    def __missing__(self, name: str) -> None:
        raise LookupError(f"{name!r} is missing in {self!r:.80}")


class Endpoint:
    """It serves in a thread of its own."""

    def __init__(self, host: str):
        self.host, self.episodes, self.told = host, {}, set()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="endpoint", daemon=True)
        self.thread.start()
        try:
            self.url = asyncio.run_coroutine_threadsafe(self._serve(), self.loop).result()
        except OSError as error:
            raise ConfigError(f"environment.host: {host!r} is no address of this machine ({error})") from None

    async def _serve(self) -> str:
        app = web.Application(client_max_size=LARGEST, middlewares=[self._as_errors])
        for path, dialect in dialects.DIALECTS.items():
            app.router.add_post(path, self._handler(dialect))
        app.router.add_get("/v1/models", self._models)
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, self.host, 0, backlog=1024).start()
        return f"http://{self.host}:{self.runner.addresses[0][1]}"

    def open(self, episode: ProgramEpisode) -> str:
        """Returns the URL. Other requests than those with the episode's secret do not reach it."""
        self.episodes[episode.secret] = episode
        return self.url

    def close_episode(self, episode: ProgramEpisode) -> None:
        self.episodes.pop(episode.secret, None)

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        def readable() -> None:
            self.loop.remove_reader(descriptor)
            os.close(descriptor)
            call()

        self.loop.call_soon_threadsafe(self.loop.add_reader, descriptor, readable)

    def read_all(self) -> None:
        """Return when the requests that clients had sent before have been opened, or when the endpoint is closed."""
        read = threading.Event()

        def again(passes: int) -> None:
            self.loop.call_soon(again, passes - 1) if passes else read.set()

        with contextlib.suppress(RuntimeError):  # closed
            self.loop.call_soon_threadsafe(again, PASSES)
            while not read.wait(1.0) and self.thread.is_alive():
                pass

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    # ---- requests

    def _episode(self, request: web.Request) -> ProgramEpisode:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        episode = self.episodes.get(request.headers.get("x-api-key") or bearer)
        if episode is None:
            raise Refused(401, "no episode has this key: it is wrong, or the episode has ended", "invalid_api_key")
        return episode

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._episode(request)
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron-rft"}
        return web.json_response({"object": "list", "data": [card]})

    def _handler(self, dialect: Dialect) -> Callable:
        async def handle(request: web.Request) -> web.StreamResponse:
            episode, raw = self._episode(request), await request.read()
            try:
                body = json.loads(raw, object_hook=Given)
                check_form(REQUEST, body)
                asked = dialect.asked(body)
                check_form(ASKED, asked)
                messages = named([plain(message) for message in asked["messages"]])
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise Refused(400, f"the request cannot be read: {type(error).__name__}: {error}") from None
            reply = self._reply(episode, request, raw, asked, messages)
            try:
                answer = await (self._stream if body.get("stream") else self._whole)(request, reply, dialect, body)
                await answer.write_eof()
                reply.delivered |= not gone(request.transport)
                return answer
            finally:
                if reply.task.done() and not reply.failed and not reply.sent:
                    reply.sent = True
                    episode.sent(len(reply.task.result()["choices"]))

        return handle

    def _reply(self, episode: ProgramEpisode, request: web.Request, raw: bytes, asked: dict, messages: list) -> Reply:
        """That of a client which asked the same and then left, or which has named its request the same."""
        own = request.headers.get("idempotency-key")
        replies = episode.jobs[own or hashlib.blake2b(raw, digest_size=16).hexdigest()]
        reply = next((each for each in replies if not each.failed and (own or each.abandoned)), None)
        if reply is None:
            reply = Reply(self.loop.create_task(self._answered(episode, asked, messages)))
            reply.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # its client may be gone
            replies.append(reply)
        reply.waiting.append(request.transport)
        return reply

    async def _answered(self, episode: ProgramEpisode, asked: dict, messages: list) -> dict[str, Any]:
        """The whole answer, as a chat completion."""
        self._check(asked)
        tools = None if asked.get("tool_choice") == "none" else asked.get("tools")
        most = asked.get("max_completion_tokens") or asked.get("max_tokens")
        stop = [given] if isinstance(given := asked.get("stop") or [], str) else given
        asks = episode.ask(messages, tools, asked.get("n") or 1, most, stop)
        answers = [await asyncio.wrap_future(ask.answer) for ask in asks]
        spoken, choices = episode.world.spoken, []
        for message, turn in answers:
            finish = "tool_calls" if message.get("tool_calls") else turn.sampled.finish_reason
            pairs = zip(turn.sampled.token_ids, turn.sampled.logprobs, strict=True)
            scored = asked.get("logprobs") and [logprob(spoken.tokenizer.decode([token]), p) for token, p in pairs]
            choice = {"index": len(choices), "message": message, "finish_reason": finish}
            choice["stop_reason"] = spoken.completed(list(turn.sampled.token_ids), stop) if finish == "stop" else None
            choices.append(choice | {"logprobs": {"content": scored} if scored else None})
        prompt, written = len(asks[0].prompt), sum(len(turn.sampled.token_ids) for _, turn in answers)
        usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
        usage["prompt_tokens_details"] = {"cached_tokens": prompt - len(asks[0].between)}
        about = {"id": f"chatcmpl-{asks[0].number}", "object": "chat.completion", "created": int(time.time())}
        return about | {"model": asked.get("model") or MODEL, "choices": choices, "usage": usage}

    def _check(self, asked: dict) -> None:
        for name, allowed in REFUSED.items():
            if asked.get(name) is not None and asked[name] not in allowed:
                why = "the policy is trained on its own distribution, and the engine returns nothing else"
                raise Refused(400, f"{name} is not supported: {why}")
        for name, why in OVERRULED.items():
            if asked.get(name) is not None:
                self._tell(name, f"the program asks for {name}={asked[name]!r:.20}; {why}")

    def _tell(self, name: str, what: str) -> None:
        """Once for each name."""
        if name not in self.told:
            self.told.add(name)
            print(f"environment: {what}", flush=True)

    # ---- answers

    @web.middleware
    async def _as_errors(self, request: web.Request, handler: Callable) -> web.StreamResponse:
        dialect = dialects.DIALECTS.get(request.path, dialects.CHAT)
        try:
            return await handler(request)
        except web.HTTPException as error:
            refused = Refused(error.status, f"{request.method} {request.path}: {error.reason}", "invalid_request")
        except web.RequestPayloadError as error:
            request.content.feed_eof()  # else aiohttp reads on, and logs the error with a traceback
            request.protocol.close()  # after the answer: it reads no further request of this connection
            refused = Refused(400, f"the request's body is broken: {str(error).splitlines()[-1].strip()}")
        except ConnectionResetError:  # the client has given up
            return web.Response(status=499)
        except Exception as error:
            refused = refusal(error)
        if refused.code != "episode_ended":  # what was open when a program ended needs no answer
            self._tell(f"{refused.code} {refused!s:.30}", f"a program's request was refused: {refused}")
        return web.json_response(dialect.error(refused), status=refused.status)

    async def _whole(self, request: web.Request, reply: Reply, dialect: Dialect, body: dict) -> web.StreamResponse:
        answer = web.json_response(dialect.whole(await asyncio.shield(reply.task), body))
        await answer.prepare(request)
        return answer

    async def _stream(self, request: web.Request, reply: Reply, dialect: Dialect, body: dict) -> web.StreamResponse:
        """Until the answer is there, comments keep the connection. An error has its status while there is one to
        send."""
        done, _ = await asyncio.wait([reply.task], timeout=KEEP_ALIVE_S)
        if done:
            reply.task.result()
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await answer.prepare(request)
        while not done:
            await answer.write(b": keep-alive\n\n")
            done, _ = await asyncio.wait([reply.task], timeout=KEEP_ALIVE_S)
        try:
            events = list(dialect.events(reply.task.result(), body))
        except Exception as error:
            events = [("error", dialect.error(refusal(error)))]  # anthropic's client reads it by its name
        for name, event in events:
            line = f"event: {name}\n" if name else ""
            await answer.write(f"{line}data: {json.dumps(event)}\n\n".encode())
        if dialect is dialects.CHAT:
            await answer.write(b"data: [DONE]\n\n")
        return answer


def check_form(form: TypeAdapter, value: Any) -> None:
    """Raise ValueError for what cannot be used, with its place."""
    try:
        form.validate_python(value, strict=True)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in wrong["loc"])
        raise ValueError(f"{place[1:] or 'it'}: {wrong['msg']} (given: {wrong['input']!r:.40})") from None


def refusal(error: Exception) -> Refused:
    """The answer to a request that caused an error. It ends nothing else."""
    if isinstance(error, Refused):
        return error
    traceback.print_exception(error)
    return Refused(500, f"the request failed: {type(error).__name__}: {error}", "server_error")


def logprob(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}


def gone(client: asyncio.Transport | None) -> bool:
    return client is None or client.is_closing()
