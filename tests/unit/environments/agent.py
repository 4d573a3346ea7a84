"""Programs for test_programs.py: `python agent.py NAME`."""

import gzip
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
ROW = json.loads(Path(os.environ["MEGATRON_RFT_ROW"]).read_text())
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]


def post(body: dict, path: str = "/chat/completions", key: str = KEY, timeout: float = 60.0, **headers) -> dict:
    headers |= {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


def ask(messages: list[dict], **more) -> dict:
    return post({"messages": messages, **more})["choices"][0]["message"]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def once() -> None:
    ask([user(ROW["question"])])


def agent() -> None:
    """A loop with tools, two sub-agents in parallel, several answers to one request, and a compacted history."""
    messages = [user(ROW["question"])]
    for turn in range(3):
        answer = ask(messages, tools=TOOLS)
        messages += [answer, {"role": "tool", "tool_call_id": "1", "content": f"<|im_end|> result {turn}"}]

    def sub(number: int) -> None:
        own = [user(f"sub-agent {number}")]
        for turn in range(2):
            own += [ask(own), user(f"go on {turn}")]

    threads = [threading.Thread(target=sub, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    several = post({"messages": [user("several")], "n": 3})["choices"]
    ask([user("several"), several[1]["message"], user("on")])
    ask([user("summary of " + str(len(messages)))], tools=TOOLS)
    Path("result.txt").write_text("done")


def several() -> None:
    post({"messages": [user("several")], "n": 4})


def tells() -> None:
    """Tells the policy where it works, as agents do."""
    answer = ask([user(os.getcwd())])
    ask([user(os.getcwd()), answer, user(os.environ["TMPDIR"])])


def fails() -> None:
    once()
    print("some output")
    raise ValueError("a bug of the program")


def floods() -> None:
    """Its output is larger than any memory: a file with a hole."""
    once()
    os.ftruncate(1, 1 << 41)
    sys.exit("the end")


def silent() -> None:
    """It never asks."""


def hangs() -> None:
    once()
    time.sleep(600)


def leaves() -> None:
    """Processes that leave its group, or its session, go on writing, and refuse to end."""
    once()
    write = "date >> late.txt; touch $$; while true; do date >> late.txt; sleep 0.05; done"
    subprocess.Popen(["sh", "-c", write])
    subprocess.Popen(["setsid", "sh", "-c", f"trap '' TERM HUP INT; {write}"])
    subprocess.Popen(["sh", "-c", f"setsid nohup sh -c '{write}' >/dev/null 2>&1 &"])
    while len(os.listdir()) < 4:  # late.txt, and a file of each
        time.sleep(0.01)


def looks() -> None:
    """Says what it sees of the machine."""
    once()
    seen = {"environment": dict(os.environ), "folder": os.getcwd(), "row": ROW}
    Path("seen.json").write_text(json.dumps(seen))


def refused() -> None:
    """Writes the status and code of each refused request."""
    found = {}

    def note(name: str, body: object, **more) -> None:
        try:
            post(body, **more)
            found[name] = "answered"
        except urllib.error.HTTPError as error:
            told = json.load(error)["error"]
            found[name] = [error.code, told.get("code", told["type"]), told["message"]]

    hi = [user("hi")]
    note("key", {"messages": hi}, key="wrong")
    note("bias", {"messages": hi, "logit_bias": {"5": 3}})
    note("json", {"messages": hi, "response_format": {"type": "json_object"}})
    note("continued", {"messages": hi, "continue_final_message": True})
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for name, more in (("form", {"output_config": {"format": form}}), ("form before", {"output_format": form})):
        note(name, {"messages": hi, "max_tokens": 9} | more, path="/messages")
    note("image", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]})
    picture = [{"type": "image", "source": {}}]
    note("picture", {"max_tokens": 9, "messages": [{"role": "user", "content": picture}]}, path="/messages")
    note("no messages", {"prompt": "hi"})
    note("no object", "hi")
    note("role", {"messages": [{"role": "wizard", "content": "hi"}]})
    note("long", {"messages": [user("word " * 400)]})
    note("large", {"messages": [user("word " * 13_450_000)]})
    note("path", {"messages": hi}, path="/embeddings")
    changes_nothing = {"logit_bias": {}, "top_logprobs": 0, "add_generation_prompt": True}
    note("fine", {"messages": hi, "temperature": 0.0, "top_p": 1} | changes_nothing)
    note("turns", {"messages": hi, "n": 9})
    note("segments", {"messages": hi, "n": 4})
    Path("refused.json").write_text(json.dumps(found))


UNUSABLE = {
    "/chat/completions": [
        *[(name, {name: value}) for name in ("max_tokens", "n") for value in (-1, 0, 4.0, "4", True)],
        ("max_completion_tokens", {"max_completion_tokens": -1}),
        *[("stop", {"stop": value}) for value in ([None], 5, [""], {"a": 1})],
        *[("messages: ", {"messages": value}) for value in (None, 5, "hi", {"role": "user"})],
        *[("messages[1]: ", {"messages": [user("hi"), value]}) for value in (5, "hi", None, [])],
        ("messages[0].role: ", {"messages": [{}]}),
        ("messages[0].content: ", {"messages": [user(5)]}),
        ("messages[0].content[0].text: ", {"messages": [user([{"type": "text", "text": 5}])]}),
        *[("messages[0].tool_calls", {"messages": [user("hi") | {"tool_calls": value}]}) for value in (5, [5], [{}])],
        *[("tools: ", {"tools": value}) for value in (5, {"a": 1}, "ab")],
        *[(name, {"stream": True, name: value}) for name in ("stream", "stream_options") for value in ("no", 1, [1])],
        ("logprobs", {"logprobs": 5}),
        *[("role", {"messages": [{"role": value, "content": "hi"}]}) for value in (5, None, ["user"])],
        ("tools[1]", {"tools": [*TOOLS, {"type": "custom", "custom": {"name": "patch"}}]}),
        ("tools[0]", {"tools": [{"type": "function", "name": "f", "parameters": {}}]}),
        ("tools[0]", {"tools": [{"type": "function", "function": {"parameters": {}}}]}),
        ("tools[0]", {"tools": [{"type": "function", "function": {"name": "f", "parameters": "a text"}}]}),
        ("tools[0]", {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": ["a"]}}}]}),
        ("tools[0]", {"tools": ["add"]}),
        ("'text' is missing in {'type': 'text'}", {"messages": [user([{"type": "text"}])]}),
        ("'name' is missing in {}", {"messages": [user("hi") | {"tool_calls": [{"function": {}}]}]}),
        ("tools", {"tools": [TOOLS[0] | {"function": {"name": "f", "description": "\ud800"}}]}),
        ("messages", {"messages": [user("half \ud800")]}),
        ("stop", {"stop": ["half \ud800"]}),
    ],
    "/messages": [
        *[("max_tokens", {"max_tokens": value}) for value in (-1, 0, 4.0, "4", True)],
        *[("stop_sequences", {"stop_sequences": value}) for value in ([None], 5, [""])],
        ("tools[0]", {"tools": [{"name": "add", "input_schema": "a text"}]}),
        ("tools[0]", {"tools": [{"name": None, "input_schema": {}}]}),
        ("messages", {"messages": [user("half \ud800")]}),
        *[("messages", {"messages": value}) for value in (None, 5, "hi", [5], [user(5)])],
        *[(f"{name}: ", {name: 5}) for name in ("tools", "output_config")],
        ("'input_schema' is missing in {'name': 'f'}", {"tools": [{"name": "f"}]}),
        ("'content' is missing in {'role': 'user'}", {"messages": [{"role": "user"}]}),
        ("'tool_use_id' is missing in {'type': 'tool_result'}", {"messages": [user([{"type": "tool_result"}])]}),
        ("'id' is missing in {'type': 'tool_use'}", {"messages": [user([{"type": "tool_use"}])]}),
    ],
    "/responses": [
        *[("max_output_tokens", {"max_output_tokens": value}) for value in (-1, 0, 4.0, "4", True)],
        ("tools[0]", {"tools": [{"type": "function", "name": "add", "parameters": {"properties": ["a"]}}]}),
        ("messages", {"input": "half \ud800"}),
        *[("input", {"input": value}) for value in (None, 5, [5], [user(5)])],
        *[(f"{name}: ", {name: 5}) for name in ("tools", "text", "include")],
        ("'type' is missing in {'name': 'f'}", {"tools": [{"name": "f"}]}),
        ("'role' is missing in {'content': 'hi'}", {"input": [{"content": "hi"}]}),
        ("'call_id' is missing in {'type': 'function_call'}", {"input": [{"type": "function_call"}]}),
    ],
}


def unusable() -> None:
    """Writes what it is told about each value that cannot be used. It is not asked again about any of them."""
    found = []
    for path, cases in UNUSABLE.items():
        for name, more in cases:
            try:
                post({"messages": [user("hi")], "input": "hi", "max_tokens": 9} | more, path=path)
                found.append([path, name, 200, "", "", str(more)])
            except urllib.error.HTTPError as error:
                told = json.load(error)
                found.append(
                    [path, name, error.code, told.get("type"), told["error"]["type"], told["error"]["message"]]
                )
    packed = gzip.compress(json.dumps({"messages": [user("hi")]}).encode())
    nested = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    broken = {"RecursionError": (nested, ""), "encoding: gzip": (packed[:15] + b"--" + packed[17:], "gzip")}
    for name, (body, encoding) in broken.items():
        headers = {"Authorization": f"Bearer {KEY}", "Content-Encoding": encoding}
        connection = http.client.HTTPConnection(urlsplit(URL).netloc, timeout=60)
        connection.request("POST", urlsplit(URL).path + "/chat/completions", body, headers)
        answer = connection.getresponse()
        found.append(["broken", name, answer.status, None, *list(json.load(answer)["error"].values())[1::-1]])
    assert not connection.sock.recv(1), "a connection whose body cannot be decoded is closed"
    post({"messages": [user("hi")], "max_tokens": None, "n": None, "stop": None, "tools": None})
    Path("unusable.json").write_text(json.dumps(found))


def waits() -> None:
    """Reads a stream line by line while the policy takes its time."""
    body = json.dumps({"messages": [user("hi")], "stream": True}).encode()
    request = urllib.request.Request(URL + "/chat/completions", body, {"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as answer:
        Path("lines.txt").write_bytes(answer.read())


def retries() -> None:
    """A client that gives up and asks again, without a header that says so, and another that says so."""
    for number, headers in enumerate(({}, {"x-stainless-retry-count": "1"}), 1):
        body = {"messages": [user(f"question {number}")]}
        connection, key = http.client.HTTPConnection(urlsplit(URL).netloc), {"Authorization": f"Bearer {KEY}"}
        connection.request("POST", urlsplit(URL).path + "/chat/completions", json.dumps(body).encode(), key)
        while not Path(f"asked_{number}").exists():  # the test writes it when the engine is asked
            time.sleep(0.01)
        connection.close()
        post(body, patient="1", **headers)
    post({"messages": [user("question 1")]})  # a question of its own: the first one was answered


def retries_of_several() -> None:
    """Three clients that ask the same and give up, and a fourth that stays. Each of the three asks again."""
    body, url = json.dumps({"messages": [user("same")]}), urlsplit(URL)
    connections = [http.client.HTTPConnection(url.netloc) for _ in range(4)]
    for connection in connections:
        connection.request("POST", url.path + "/chat/completions", body, {"Authorization": f"Bearer {KEY}"})
    while not Path("asked").exists():  # the test writes it when the engine is asked
        time.sleep(0.01)
    for connection in connections[:3]:
        connection.close()
    ids = []

    def again() -> None:
        ids.append(post(json.loads(body), patient="1", **{"x-stainless-retry-count": "1"})["id"])

    threads = [threading.Thread(target=again) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids.append(json.load(connections[3].getresponse())["id"])
    named = [post(json.loads(body), **{"idempotency-key": "one"})["id"] for _ in range(2)]
    Path("ids.json").write_text(json.dumps([ids, named]))


def openai_client() -> None:
    """Openai's own client, with its helpers."""
    import asyncio

    import openai

    client, messages = openai.OpenAI(), [user("one")]
    assert client.models.list().data[0].id == os.environ["MEGATRON_RFT_MODEL"]
    answer = client.chat.completions.create(model="policy", messages=messages, logprobs=True, max_tokens=4)
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens <= 4
    messages += [answer.choices[0].message.model_dump(), user("two")]
    text, usage = "", None
    asked = {"model": "policy", "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    for event in client.chat.completions.create(**asked):
        text += (event.choices[0].delta.content or "") if event.choices else ""
        usage = event.usage or usage
    assert usage.prompt_tokens_details.cached_tokens > 0
    messages += [{"role": "assistant", "content": text}, user("three")]
    with client.chat.completions.stream(model="policy", messages=messages) as stream:
        final = stream.get_final_completion()
    messages += [final.choices[0].message.model_dump(), user("four")]

    async def later() -> None:
        client = openai.AsyncOpenAI()
        answer = await client.chat.completions.create(model="policy", messages=messages)
        assert answer.usage.prompt_tokens_details.cached_tokens > 0

    asyncio.run(later())
    try:
        client.chat.completions.create(model="policy", messages=messages, frequency_penalty=1.0)
    except openai.BadRequestError as error:
        assert error.code == "unsupported", error


def calls_tools() -> None:
    """Openai's client with tools: the calls of the policy come as calls, also in a stream."""
    import openai

    client, messages = openai.OpenAI(), [user("add")]
    for streams in (False, True):
        asked = {"model": "policy", "messages": messages, "tools": TOOLS}
        if streams:
            with client.chat.completions.stream(**asked) as stream:
                answer = stream.get_final_completion()
        else:
            answer = client.chat.completions.create(**asked)
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and call.function.name == "add"
        result = {"role": "tool", "tool_call_id": call.id, "content": str(json.loads(call.function.arguments)["a"] + 1)}
        messages += [choice.message.model_dump(), result]
    answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, stop=["st"])
    Path("said.txt").write_text(f"{answer.choices[0].message.content}|{answer.choices[0].finish_reason}")


def anthropic_route() -> None:
    """Anthropic's form: tools, a state of the system at the end that changes, and a stream."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"model": "policy", "max_tokens": 300, "system": [{"type": "text", "text": "You help."}]}
    asked |= {"tools": [{"name": "add", "description": "Adds.", "input_schema": schema}]}
    url, found = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", []

    def send(messages: list[dict], **more) -> str:
        body = json.dumps(asked | {"messages": messages} | more).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body, {"x-api-key": KEY})) as answer:
            return answer.read().decode()

    messages = [user("add")]
    state = {"role": "system", "content": "10 tokens left"}
    answer = json.loads(send([*messages, state]))
    thought, text, call = answer["content"]
    found.append([thought["type"], text["text"], call["name"], call["input"], answer["stop_reason"]])
    messages += [{"role": "assistant", "content": answer["content"]}]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "42"}]}
    messages += [{"role": "user", "content": [result, {"type": "text", "text": "Go on."}]}]
    lines = send([*messages, state | {"content": "5 tokens left"}], stream=True).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [f"event: {each['type']}" for each in events] == [line for line in lines if line.startswith("event: ")]
    said = "".join(each["delta"]["text"] for each in events if each["type"] == "content_block_delta")
    found.append([said, events[-2]["usage"]["cache_read_input_tokens"] > 0])
    messages += [{"role": "assistant", "content": "It is 42."}, user("What is it?")]
    for streams in (False, True):
        text = send(messages, stop_sequences=["hing", "et"], stream=streams)
        found.append(re.findall('"stop_(?:reason|sequence)": ([^,}]+)', text))
    try:
        send(messages, tool_choice={"type": "any"})
    except urllib.error.HTTPError as error:
        found.append([error.code, json.load(error)["error"]["type"]])
    Path("found.json").write_text(json.dumps(found))


def responses_route() -> None:
    """/v1/responses by openai's client, as codex asks it: items, calls of functions, streams."""
    import openai

    client, found = openai.OpenAI(max_retries=0), []
    function = {"type": "function", "name": "add", "strict": False, "parameters": TOOLS[0]["function"]["parameters"]}
    asked = {
        "model": "policy",
        "instructions": "You help.",
        "tools": [{"type": "namespace", "name": "sums", "tools": [function]}],
    }
    asked["tools"] += [{"type": "web_search"}]
    scored = "message.output_text.logprobs"
    asked |= {"tool_choice": "auto", "store": False, "include": ["reasoning.encrypted_content"]}
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "add"}]}]
    with client.responses.stream(input=items, **asked) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    thought, text, call = first.output
    found.append(
        [thought.content[0].text, text.content[0].text, call.namespace, call.name, call.arguments, first.status]
    )
    found.append([kinds[0], kinds[1], kinds[-1], sorted({*kinds[2:-1]})])
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
    second = client.responses.create(input=items, **asked)
    found.append([second.output_text, second.usage.input_tokens_details.cached_tokens > 0, second.status])
    items += [item.model_dump(exclude_none=True) for item in second.output] + [user("more")]
    third = client.responses.create(input=items, **asked | {"max_output_tokens": 2, "include": [scored]})
    assert [each.token for each in third.output[0].content[0].logprobs] == ["S", "o"]
    found.append([third.status, third.incomplete_details.reason, third.usage.output_tokens])
    image = {"type": "input_image", "image_url": "data:image/png;base64,"}
    for name, more in {
        "image": {"input": [{"role": "user", "content": [image]}]},
        "kept": {"previous_response_id": first.id},
        "tool": {"tools": [{"type": "custom", "name": "patch"}]},
        "form": {"text": {"format": {"type": "json_object"}}},
    }.items():
        try:
            client.responses.create(**asked | {"input": "hi"} | more)
        except openai.BadRequestError as error:
            found.append([name, error.status_code, error.code, error.body["message"]])
    Path("found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
