"""Uses a vLLM server as an engine: token ids over HTTP, weights over TCP.

The recipe gives the server's URL, or the run starts the server (`server_process.py`). A server can receive weights
while it generates: it pauses, loads them, recomputes the caches of unfinished responses, and continues.

Calls to a server that no longer answers raise `EngineLost`. `start` then waits until a server of the recipe is back,
since somebody else may restart it; a server of the run is started again.

HTTP uses Python's `http.client`: `close` must interrupt answers that other threads wait for, and does so by shutting
down the connection's socket.
"""

import contextlib
import http.client
import json
import queue
import re
import secrets
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from megatron_rft.config.vllm import EXACT_CACHES
from megatron_rft.families.towers import sees
from megatron_rft.inference.acceptance import Acceptance
from megatron_rft.inference.engine import EngineLost, Group, Request, Sampling
from megatron_rft.inference.pool import Member
from megatron_rft.inference.transport import network
from megatron_rft.inference.transport.shared_memory import local_gpu
from megatron_rft.inference.vllm import cpu_patches, server_checks, token_check
from megatron_rft.inference.vllm.arguments import command, kept_tokens, sampling_parameters
from megatron_rft.records import Response
from megatron_rft.utils.errors import ConfigError, RunFailed
from megatron_rft.utils.network_interface import name_for_gloo

GENERATE, PING = "/inference/v1/generate", "/is_paused"  # answered by the engine itself, unlike /health
ANSWER_S = 30.0  # timeout of a health check
DYING_S = 10  # a server notices that its engine is dead after at most this time
PING_S = 2.0  # interval of health checks while waiting for responses


class ServerEngine(Member):
    """`longest`: tokens of a prompt and response that must fit. `keep_caches`: unfinished responses keep their keys and
    values when new weights come."""

    joins = True

    def __init__(
        self,
        url: str,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        start_timeout_s: float = 600.0,
        silence_timeout_s: float = 300.0,
        longest: int = 0,
        keep_caches: bool = False,
        authorization: dict[str, str] | None = None,
    ):
        """`authorization`: the header with the server's token; None: that of this process's environment."""
        self.url, self.config, self.dtype = url.rstrip("/"), config, dtype
        self.longest, self.keep_caches = longest, keep_caches
        self.start_timeout_s, self.silence_timeout_s = start_timeout_s, silence_timeout_s
        self.authorization = token_check.header() if authorization is None else authorization
        self.workers = 0  # of the server; 0 until it has answered
        self.name = f"the server {self.url}"
        self.link = None
        self._open: set[http.client.HTTPConnection] = set()  # connections that wait for answers without a time limit
        self._lock, self._epoch = threading.Lock(), 0  # `_hang_up` begins a new epoch
        if sees(config):  # here, before there are threads
            cpu_patches.prepare()
            from megatron_rft.inference.vllm.images import features

            self.features = features
        self.start()

    def start(self) -> None:
        self.acceptance = Acceptance()
        self._disconnect()
        self._wait_until_ready()
        self._check_facts()
        self._connect()

    def _wait_until_ready(self) -> None:
        """Wait for a server that answered before. One that never answered is an error in the recipe."""
        try:
            wait_until_ready(self._health, self.start_timeout_s if self.workers else 0)
        except RunFailed as error:
            why = f"no vLLM server answers at {self.url} ({error})"
            raise ConfigError(f"rollout.servers: {why}. {self._how()}") from None

    def _health(self) -> None:
        self._text("GET", PING if self.workers else "/health", timeout_s=ANSWER_S)  # HTTP may outlive the engine

    def _check_facts(self) -> None:
        """Check that the server serves this model and can receive its weights. Raises ConfigError."""
        where = f"rollout.servers: {self.url}"
        try:
            workers = self._rpc("rft_facts")
        except (RunFailed, ValueError) as error:
            raise ConfigError(f"{where} cannot take weights from a trainer ({error}). {self._how()}") from None
        facts, how = workers[0], self._how()
        problems = server_checks.problems(facts, self.config, self.dtype, self.longest, self.keep_caches, how)
        if problem := next(problems, None) or self._without_token_ids():
            raise ConfigError(f"{where} {problem}")
        self.rounds = facts["quantization"] is not None or facts["kv_cache_dtype"] not in EXACT_CACHES
        self.workers = int(facts["workers"])
        self.sequences = int(facts["sequences"]) * int(facts["replicas"])  # more requests wait in this process
        self.transport = network.transport([local_gpu(), *(worker["gpu"] for worker in workers)])

    def _without_token_ids(self) -> str | None:
        """Return the problem that the server has no endpoint for token ids, or None. A GET of an existing endpoint has
        another status than 404."""
        try:
            self._text("GET", GENERATE, timeout_s=ANSWER_S)
        except RunFailed as error:
            return f"takes no token ids ({error}). {self._how()}" if ": 404 " in str(error) else None
        return None

    def _how(self) -> str:
        room = {"max_model_len": self.longest} if self.longest else {}
        line = shlex.join(command("MODEL", self.dtype, host="HOST", arguments=room, seeing=sees(self.config))[1:])
        return f"A server for training is started by\nVLLM_SERVER_DEV_MODE=1 VLLM_USE_V2_MODEL_RUNNER=0 python {line}"

    def _connect(self) -> None:
        """Form the process group for weights: this process and the server's workers."""
        host, size, limit_s = local_address(self.url), 1 + self.workers, self.silence_timeout_s
        if not host.startswith("127."):  # the URL may name this machine
            name_for_gloo(urlsplit(self.url).hostname)
        store = network.rendezvous(host, size, limit_s)
        address = {"host": host, "port": store.port, "size": size, "timeout_s": limit_s}
        address |= {"transport": self.transport, "secret": secrets.token_hex(16)}
        device = torch.device("cuda", torch.cuda.current_device()) if self.transport == network.GPU else None
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(self._call, "POST", "/init_weight_transfer_engine", {"init_info": address})
            try:
                self.link = network.connect(store, 0, size, limit_s, device, address["secret"])
            except RuntimeError as error:
                answer.result()  # raises the server's own error, if it has one
                raise EngineLost(
                    f"{self.name}: its workers do not reach {host}:{store.port} ({self.transport}: {error})"
                ) from None
            answer.result()

    # ---- generation

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Group]:
        answers: dict[int, list[Response | None]] = {request.id: [None] * request.n for request in requests}
        ended, epoch = queue.Queue(), self._epoch
        count = sum(request.n for request in requests)
        with ThreadPoolExecutor(min(self.sequences, max(count, 1)), thread_name_prefix="server") as pool:
            for request in requests:
                images = once(partial(self._images, request))  # its responses share what is made of its images
                for sample in range(request.n):
                    pool.submit(self._ask, request, sample, sampling, images, ended, epoch)
            try:
                for _ in range(count):
                    request, sample, answer = self._next(ended)
                    answers[request.id][sample] = answer
                    if None not in answers[request.id]:
                        yield Group(request.id, tuple(answers.pop(request.id)))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                if answers:
                    self._hang_up()

    def _next(self, ended: queue.Queue) -> tuple:
        """Wait for the next finished response, and check meanwhile that the engine behind the server is alive."""
        while True:
            try:
                request, sample, answer = ended.get(timeout=PING_S)
            except queue.Empty:
                self._call("GET", PING)
                continue
            if isinstance(answer, Exception):
                raise answer
            return request, sample, answer

    def _images(self, request: Request) -> dict[str, Any]:
        if request.problem is None or request.problem.images_key < 0:
            return {}
        return {"features": self.features(request.prompt_ids, request.problem.images, self.config, self.dtype)}

    def _ask(
        self,
        request: Request,
        sample: int,
        sampling: Sampling,
        images: Callable[[], dict[str, Any]],
        ended: queue.Queue,
        epoch: int,
    ) -> None:
        parameters = sampling_parameters(request, sample, sampling)
        try:
            body = {"token_ids": list(request.prompt_ids), "sampling_params": parameters} | images()
            (choice,) = self._call("POST", GENERATE, body, epoch=epoch)["choices"]
            if choice["finish_reason"] == "abort":  # vLLM aborts what is unfinished when it is told to end
                raise EngineLost(f"{self.name} is ending: it has aborted a response")
            answer: Any = as_response(choice, sampling.truncates)
        except Exception as error:
            answer = error
        ended.put((request, sample, answer))

    # ---- weights

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        # Pause even without unfinished requests: another thread may be about to send one.
        self._call("POST", "/pause?mode=keep" + ("&clear_cache=false" if self.keep_caches else ""))
        self._call("POST", "/start_weight_update")
        with ThreadPoolExecutor(1) as thread:  # without a limit: the answer comes when the whole stream is loaded
            update = thread.submit(self._call, "POST", "/update_weights", {"update_info": {}}, self._epoch)
            try:
                self._send(stream, update)
            except BaseException:
                self._hang_up()  # the thread would wait for ever
                raise
        self._call("POST", "/finish_weight_update", {"weight_version": str(version)})
        for problem in (each["problem"] for each in self._rpc("rft_problem")):
            if problem:
                raise RunFailed(f"weights of version {version}: {problem}")
        if not self.keep_caches:  # they were computed with the former weights
            self._call("POST", "/reset_prefix_cache?reset_running_requests=true")
        if sees(self.config):
            self._call("POST", "/reset_encoder_cache")
        self._call("POST", "/resume")

    def _send(self, stream: Iterable[tuple[str, Tensor]], update: Future) -> None:
        """Send the stream, each part of it within the limit of the link, and wait for the answer `update`."""
        try:
            network.send(self.link, stream)
        except RuntimeError as error:
            if isinstance(error, RunFailed):
                raise
            self._wait_for(update)  # raises the server's own error, if it has one
            raise EngineLost(f"{self.name} was lost while it got weights ({error})") from None
        self._wait_for(update)

    def _wait_for(self, answer: Future) -> None:
        done, _ = wait([answer], self.silence_timeout_s)
        if not done:
            raise EngineLost(f"{self.name} does not answer: timed out")
        answer.result()

    def checksums(self) -> dict[str, int]:
        return {name: value and int(value) for name, value in self._rpc("rft_checksums")[0].items()}

    def statistics(self) -> dict[str, float]:
        try:
            text = self._text("GET", "/metrics")
        except EngineLost:
            raise
        except RunFailed:  # the server has no metrics
            return {}
        lines = re.finditer(r"^(vllm:spec_\w+)_total(?:{.*})? (\S+)$", text, re.MULTILINE)
        return self.acceptance.since((line[1], float(line[2])) for line in lines)

    def close(self) -> None:
        self._hang_up()
        self._disconnect()

    def _disconnect(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = None

    # ---- HTTP

    def _rpc(self, method: str) -> list[dict]:
        answer = self._call("POST", "/collective_rpc", {"method": method})
        if not isinstance(answer, dict) or not answer.get("results"):
            raise RunFailed(f"{self.name} is no vLLM server: /collective_rpc is answered with {str(answer)[:80]!r}")
        return answer["results"]

    def _call(self, method: str, path: str, body: dict | None = None, epoch: int | None = None) -> Any:
        """Send a request and return the answer's JSON; None if it is empty. Raises the errors of `_text`."""
        text = self._text(method, path, body, epoch=epoch)
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise RunFailed(f"{self.name} is no vLLM server: {path} is answered with {text[:80]!r}") from None

    def _text(
        self, method: str, path: str, body: dict | None = None, timeout_s: float = 0.0, epoch: int | None = None
    ) -> str:
        """Send a request and return the answer's text. With `epoch` there is no time limit, and `_hang_up` interrupts
        the call.

        Raises:
            EngineLost: there is no answer.
            RunFailed: the server refuses.
        """
        parts, timeout = urlsplit(self.url), timeout_s or self.silence_timeout_s
        connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout)
        try:
            connection.connect()
            if epoch is not None:
                connection.sock.settimeout(None)
                with self._lock:
                    if epoch != self._epoch:
                        raise ConnectionAbortedError("nobody waits for the answer any more")
                    self._open.add(connection)
            content = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json"} | self.authorization
            connection.request(method, parts.path + path, content, headers)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise EngineLost(f"{self.name} does not answer: {error or type(error).__name__}") from None
        finally:
            self._open.discard(connection)
            connection.close()
        if answer.status >= 500 and path in ("/health", PING, GENERATE):
            raise EngineLost(f"{self.name} is broken: {answer.status} {text[:200]}".rstrip())
        if answer.status >= 500:  # raises EngineLost if the engine behind has died, which the server notices later
            for _ in range(DYING_S):
                self._text("GET", "/health")
                time.sleep(1)
        if answer.status >= 400:
            raise RunFailed(f"{self.name} refuses {path.partition('?')[0]}: {answer.status} {text[:400]}")
        return text

    def _hang_up(self) -> None:
        """Interrupt all open requests, and those that are about to be sent."""
        with self._lock:
            self._epoch += 1
            for connection in list(self._open):
                with contextlib.suppress(OSError, AttributeError):  # the request has just ended
                    connection.sock.shutdown(socket.SHUT_RDWR)


def wait_until_ready(ask: Callable[[], None], limit_s: float, process: subprocess.Popen | None = None) -> None:
    """Call `ask` until it succeeds. Raises its last RunFailed (EngineLost is one) after `limit_s` seconds, or when
    the server's `process` has ended."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return ask()
        except RunFailed:
            if time.monotonic() > deadline or (process is not None and process.poll() is not None):
                raise
        time.sleep(0.5)


def once(compute: Callable[[], Any]) -> Callable[[], Any]:
    """`compute` for several threads: the first one runs it, and the others wait for its result."""
    lock, computed = threading.Lock(), cache(compute)

    def result() -> Any:
        with lock:
            return computed()

    return result


def local_address(url: str) -> str:
    """Return the address of this machine that the server at `url` can reach."""
    parts = urlsplit(url)
    addresses = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
    family, *_, address = min(addresses)  # IPv4 first
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]


def as_response(choice: dict[str, Any], truncates: bool) -> Response:
    """Build a Response from vLLM's answer. Its version is that of the weights that generated the first token."""
    tokens, supports = tuple(choice["token_ids"]), ()
    logprobs = tuple(each["logprob"] for each in choice["logprobs"]["content"])
    assert len(tokens) == len(logprobs), f"{len(tokens)} tokens, {len(logprobs)} log-probs"
    versions = choice.get("weight_versions")
    if not versions or not versions[0]["version"].isdecimal():
        raise RunFailed(f"a server generated a response with weights that this run did not send: {versions}")
    if truncates:
        content = [each["top_logprobs"] for each in choice["logprobs"]["content"]]
        supports = tuple(kept_tokens((one["token_id"], one["logprob"]) for one in each) for each in content)
    return Response(tokens, logprobs, choice["finish_reason"], int(versions[0]["version"]), supports)
