"""Episodes that show images: the engine's numbers are the trainer's, and those of what was shown."""

import base64
import io
import sys
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
from PIL import Image

from examples.vision import make
from megatron_rft.config import Batching, Megatron
from megatron_rft.config.environment import Program
from megatron_rft.conversion.folder import load_config
from megatron_rft.data.images import PromptImages
from megatron_rft.data.prompts import prompt_set
from megatron_rft.data.rendering import PromptFormat
from megatron_rft.environments.player import Episodes, turn_seed
from megatron_rft.environments.process import EnvironmentProcesses
from megatron_rft.environments.program import ProgramEpisode
from megatron_rft.environments.programs import Programs
from megatron_rft.environments.template import Template
from megatron_rft.environments.turns import plain
from megatron_rft.inference.engine import Request, Sampling
from megatron_rft.inference.hf.engine import HFEngine
from megatron_rft.megatron import parallel
from megatron_rft.megatron.actor import Actor
from megatron_rft.responses import SHOWN, Score
from megatron_rft.rollout.sampler import ScoredResponse, to_batch
from tests.parity.hf_cases import own_tensors

WORLD = '''
import base64, io, shutil, tempfile
from PIL import Image
from megatron_rft.environments import Environment, Turn


class Shows(Environment):
    """Shows a picture after a turn, of another size and in another form each time; the problem's own comes back. Each
    is written to the same file, which is gone at the end."""

    def reset(self, prompt, seed):
        self.own, self.seed, self.turns, self.folder = prompt.images, seed % 200, 0, tempfile.mkdtemp()
        return self.picture(84) if prompt.fields["opens"] else None

    def step(self, text):
        self.turns += 1
        return Turn(self.picture(56 * self.turns), done=self.turns == 3)

    def picture(self, side):
        Image.new("RGB", (side, 56), (self.seed, side, 90)).save(file := io.BytesIO(), "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        with open(path := f"{self.folder}/screen.png", "wb") as screen:
            screen.write(file.getvalue())
        parts = [{"type": "image", "image": path}, {"type": "image_url", "image_url": {"url": url}}]
        parts.append({"type": "image", "image": file.getvalue()})
        own = [{"type": "image", "image": image} for image in self.own or ()]
        text = {"type": "text", "text": "<image> <|image_pad|> is text. "}
        return [{"role": "user", "content": [text, parts[self.turns % 3], *own]}]

    def close(self):
        shutil.rmtree(self.folder)


class Breaks(Shows):
    def picture(self, side):
        return [{"role": "user", "content": [{"type": "image", "image": b"no picture"}]}]
'''


AGENT = """
import base64, io, json, os, urllib.request
from PIL import Image

ROW, KEY = json.load(open(os.environ["MEGATRON_RFT_ROW"])), os.environ["OPENAI_API_KEY"]


def picture(side):
    Image.new("RGB", (side, 56), (side, 9, int(os.environ["MEGATRON_RFT_SEED"]) % 99)).save(file := io.BytesIO(), "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def ask(path, key, messages):
    body = json.dumps({"messages": messages, "max_tokens": 8}).encode()
    headers = {"Authorization": f"Bearer {KEY}"}
    with urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, body, headers)) as answer:
        return json.load(answer)[key]


def chat(messages):
    return ask("/chat/completions", "choices", messages)[0]["message"]


def user(text, *urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


main = [user(ROW["question"], *ROW["images"])]
main += [chat(main), user("And this?", picture(56))]
source = {"type": "base64", "media_type": "image/png", "data": picture(112).partition(",")[2]}
ask("/messages", "content", [{"role": "user", "content": [{"type": "image", "source": source}]}])
main += [chat(main), user("No picture.")]
chat(main)
"""


@pytest.fixture
def made(tmp_path):
    make.write_model(tmp_path / "model")
    (tmp_path / "world.py").write_text(WORLD)
    (tmp_path / "agent.py").write_text(AGENT)
    tokenizer, config = make.tokenizer(), load_config(tmp_path / "model")
    tokenizer.name_or_path = str(tmp_path / "model")
    rows = [{"question": "a?", "image": make.blank(), "answer": "1", "opens": 0}, {"question": "b?", "opens": 1}]
    rows.append({"question": "c?", "image": make.blank(), "opens": 1})
    rows = [{"image": None, "answer": "1"} | row for row in rows]
    form = PromptFormat(chat=True, image_field="image", image_pixels=(28 * 28, 112 * 112))
    prompts = prompt_set(rows, tokenizer, form, "rows").prompts
    weights = {name: tensor if "norm" in name else tensor / 3 for name, tensor in own_tensors(config)}
    with closing(HFEngine(config)) as engine:
        engine.load_weights(weights.items(), 3)

        def play(kind, prompts=prompts):
            own = {"kind": "own", "episode": f"{tmp_path}/world.py:{kind}"}
            player, options = Episodes, {"name": kind, "max_turns": 4, "album": tmp_path / "album"}
            if kind == "program":
                given = Program(kind="program", command=[sys.executable, str(tmp_path / "agent.py")], max_turns=9)
                own, player, options = given.own_options(), Programs, options | {"options": given}
            processes = EnvironmentProcesses(own, 2, 60.0, tmp_path / "log")
            ends = tuple(range(0, len(tokenizer), 3))
            template = Template(tokenizer, (*ends, tokenizer.eos_token_id))
            with closing(player(engine, processes, template, tokenizer.decode, **options)) as player:
                requests = [Request(p.index, p.token_ids, 6, p.index, problem=p) for p in prompts]
                groups = player.generate(requests, Sampling(400, stop_token_ids=template.stops))
                return {group.id: group.responses for group in groups}

        yield play, prompts, config, weights, tmp_path / "album"


@pytest.mark.parametrize("kind", ["Shows", "program"])
def test_the_trainer_computes_what_the_engine_has_seen(made, kind):
    play, prompts, config, weights, album = made
    found = play(kind)
    assert found == play(kind)
    if kind == "program":
        found = {index: [each.joined() for each in given] for index, given in found.items()}
        assert all(each.segment_count == 2 and len(each.turns) == 4 for given in found.values() for each in given)
    rollouts = [
        ScoredResponse(p.index, n, p, response, "", Score(0.0))
        for p in prompts
        for n, response in enumerate(found[p.index])
    ]
    batch, images = to_batch(rollouts), PromptImages(prompts, album)
    assert sum(len(response.turns) >= 3 for each in found.values() for response in each) >= 4
    shown = [each for each in rollouts if each.response.images is not None]
    assert len({each.response.images for each in shown}) > 2 and all(each.response.images >= SHOWN for each in shown)
    assert kind == "program" or "<image> <|image_pad|> is text. <image>" in shown[0].response.said[0]
    image = config.image_token_id
    written = batch.response_ids[batch.response_mask > 0]
    assert (batch.response_ids == image).any() and not (written == image).any()
    sizes = [[len(images.grids(key)) for key in (key, key + (kind == "program"))] for key in batch.images.tolist()]
    most = {
        "Shows": [7, 7],
        "program": [2, 1],
    }  # its own, then three times two; one in each of two segments
    assert max(sizes) == most[kind]
    try:
        parallel.initialize(Megatron())
        actor = Actor(config, Megatron(), Batching(micro_batch_tokens=1500), "fp32")
        actor.load(weights.__getitem__)
        actor.see(images)
        mask = batch.response_mask > 0

        def difference():
            computed = actor.outputs(batch, frozenset({"logprobs"}))["logprobs"]
            return (computed - batch.tokens["rollout_logprobs"])[mask].abs().max()

        assert difference() < 1e-5
        Image.effect_noise((56, 56), 90).convert("RGB").save(other := io.BytesIO(), "PNG")
        for path in album.glob("*/*"):
            if path.suffix != ".json" and Image.open(path).size == (56, 56):
                path.write_bytes(other.getvalue())
        actor.see(PromptImages(prompts, album))
        assert difference() > 1e-3, "another picture gives other numbers"
    finally:
        parallel.shutdown()


@pytest.mark.parametrize(
    ("kind", "reads", "message"),
    [("Breaks", True, "a message is no image of a known format"), ("Shows", False, "set data.image_field")],
)
def test_an_image_that_cannot_be_shown_costs_its_episode(made, kind, reads, message):
    play, prompts, *_ = made
    prompts = prompts if reads else [replace(prompts[1], images=None)]
    for responses in play(kind, prompts).values():
        for response in responses:
            heard = any("cut off" not in said for said in response.said)
            assert (response.finish_reason == "abort") == (response.score is not None), response
            assert not heard or message in response.score.error, response


def test_a_turns_seed_depends_on_its_images_and_not_on_the_order_of_requests(made):
    _, (_, bare, *_), *_ = made
    world = SimpleNamespace(options=Program(kind="program", command=["x"]), template=Template(make.tokenizer(), (0,)))

    def asked(color):
        Image.new("RGB", (56, 56), color).save(file := io.BytesIO(), "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        return [plain({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})]

    def seeds(*colors):
        episode = ProgramEpisode(world, Request(0, bare.token_ids, 1, 7, problem=bare), 0, 400, None)
        asks = [(color, episode.ask(asked(color), None, 1, None, [])[0]) for color in colors]
        assert len({ask.prompt for _, ask in asks}) == 1, "the same tokens"
        return {(color, ask.occurrence): ask.seed for color, ask in asks}

    found = seeds("red", "blue", "red")
    assert found == seeds("blue", "red", "red") and len({*found.values()}) == 3
    episode = ProgramEpisode(world, Request(0, bare.token_ids, 1, 7, problem=bare), 0, 400, None)
    (ask,) = episode.ask([{"role": "user", "content": "hi"}], None, 1, None, [])
    assert ask.seed == turn_seed(episode.request, 0, ask.prompt, 0), "a text's seed"
