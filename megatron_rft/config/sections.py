"""The sections of a recipe, as typed models: every option, its default and its meaning. No torch.

A section checks its own fields; `recipe.py` and `plan/checks.py` check several sections together. Options of `megatron`
and `optimizer` have megatron-core's names; other fields of its configuration classes pass through (`passthrough.py`).
"""

import inspect
import math
import os
import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from megatron_rft.config import datasets, passthrough
from megatron_rft.config.engines import ENGINES
from megatron_rft.config.messages import at, hint, shown

Count = Annotated[int, Field(ge=1)]
MOST_PIXELS = 1 << 26  # of an image: no larger one is read
Natural = Annotated[int, Field(ge=0, lt=2**63)]  # torch takes no larger seed
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
ShareOrAll = Annotated[float, Field(ge=0, le=1)]
# YAML reads off as false
AutoOrOff = Annotated[Literal["auto", "off"], BeforeValidator(lambda value: "off" if value is False else value)]
MAX_TOP_K = 64  # bounds the tokens of truncated sampling that travel with each response token

CHAT_ARGUMENTS = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"}


def _path(text: str) -> str:
    if variable := re.search(r"\$(\w+|{.*?})", text):
        raise ValueError(f"{shown(text)}: {variable[0]} is not replaced in a recipe: write the path itself")
    if not text or "\0" in text or max(map(len, text.encode().split(b"/"))) > 255:  # bytes
        raise ValueError(f"{shown(text)} cannot be the name of a file or a folder")
    return os.path.expanduser(text)


FilePath = Annotated[str, AfterValidator(_path)]  # ~ is replaced


class SectionType(type(BaseModel)):
    """Gives a class arguments beside pydantic's `extra`, and builds its validator at its first use: a recipe uses few.
    `without`: options of its base that this section lacks. They cannot be written there, and shared code reads the
    values in the class's body, else the defaults. Others are options with one possible value: `class GRPO(Clipped,
    name="grpo")`."""

    def __new__(mcs, name: str, bases: tuple, namespace: dict, /, without: Iterable[str] = (), **more: Any):
        config: dict[str, Any] = {"defer_build": True} | ({"extra": more.pop("extra")} if "extra" in more else {})
        values = {option: bases[0].model_fields[option].default for option in without}
        annotations = {option: Literal[value] for option, value in more.items()}
        annotations |= namespace.get("__annotations__", {}) | dict.fromkeys(values, ClassVar)
        return super().__new__(mcs, name, bases, more | values | namespace | {"__annotations__": annotations}, **config)


class Section(BaseModel, metaclass=SectionType):
    """Unknown keys are errors, and values are not converted: `"3"` is not 3, `true` is not 1. A class may have a method
    `_check` of its options together, which raises `messages.at`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=(), validate_default=True)

    @model_validator(mode="after")
    def _checked(self):
        """Call the `_check` of each class, the base's first."""
        for kind in reversed(type(self).__mro__):
            if inspect.isfunction(check := vars(kind).get("_check")):  # no validator of a user's own section
                check(self)
        return self

    @property
    def extra(self) -> dict[str, Any]:
        """The given options that are no fields, of a section that passes them through."""
        return self.model_extra or {}

    def differs(self, key: str) -> bool:
        """Whether the option exists and differs from its default. Options without effect are refused only then."""
        return key in type(self).model_fields and getattr(self, key) != type(self).model_fields[key].default

    def unused(self, if_so: object, why: str, *keys: str, place: str = "") -> None:
        """Refuse those of the options `keys` that differ from their defaults, if they have no effect. `place`: of this
        section, with a dot, in a check of the whole recipe."""
        for key in keys if if_so else ():
            if self.differs(key) or key in self.extra:
                raise at(place + key, f"does nothing {why}")


class Run(Section):
    output_dir: FilePath
    """Folder of everything the run writes: metrics, checkpoints, the exported model."""
    name: str | None = None
    """The run's name in displays and trackers. None: the output folder's name."""
    seed: Natural = 0
    """Seed of randomly initialised weights, of the data's order and of sampling."""
    steps: Count | None = None
    """Training steps: sampled batches in RL, optimizer steps in SFT and offline."""
    epochs: Positive | None = None
    """SFT and offline: passes over the training set, instead of `steps`."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: resume from the newest complete checkpoint in output_dir, if there is one. never: refuse a folder that
    holds a run. must: refuse a folder without such a checkpoint (trainer generate: without a run)."""
    access: Literal["owner", "group", "all"] = "group"
    """Who may read the run's files, as far as the umask allows it: prompts and responses can be confidential."""


class Model(Section):
    path: FilePath
    """Folder in Hugging Face format, or a name on its hub."""
    tokenizer: FilePath | None = None
    """Folder or hub name of the tokenizer. None: `path`."""
    precision: Literal["fp32", "bf16", "fp8"] = "bf16"
    """Precision of the model's arithmetic; fp8 is bf16 with fp8 matrix products. The optimizer's parameters are always
    fp32."""
    initialise: Literal["pretrained", "random"] = "pretrained"
    """random: read only the architecture from `path` and draw the weights from run.seed."""
    reference: FilePath | None = None
    """The frozen reference model of KL terms. None: the weights that training starts from."""
    vision: Literal["frozen", "trained"] = "frozen"
    """Of a model that reads images: whether its vision tower is trained."""


class Megatron(Section, extra="allow"):
    """Fields of megatron-core's TransformerConfig and DistributedDataParallelConfig."""

    tensor_model_parallel_size: Count = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: Count = 1
    """Ranks that share the stack of layers."""
    virtual_pipeline_model_parallel_size: Count | None = None
    """Interleaved model chunks per pipeline rank. None: one, without interleaving."""
    context_parallel_size: Count = 1
    """Ranks that share each sequence."""
    expert_model_parallel_size: Count = 1
    """Ranks that share the experts of a mixture."""
    expert_tensor_parallel_size: Count | None = None
    """Ranks that share each expert's matrices. None: tensor_model_parallel_size."""
    sequence_parallel: bool = False
    """Split norms and residuals over the tensor-parallel ranks: less memory, the same results."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Activations to recompute in the backward pass instead of storing them. None: store all."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full recompute: uniform groups of layers, or the first layers of each stage."""
    recompute_num_layers: Count | None = None
    """With full recompute: layers per group (uniform) or in total (block)."""
    fp8: Literal["e4m3", "hybrid"] = "hybrid"
    """With model.precision fp8: the format; hybrid uses e5m2 for gradients."""
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise"] | None = None
    """With model.precision fp8: Transformer Engine's scaling. None: blockwise on Hopper, mxfp8 on Blackwell, else
    tensorwise."""
    moe_router_bias_update_rate: NonNegative = 0.0
    """Mixtures whose routers have an expert bias: the step by which the bias of each expert moves towards the mean load
    after each optimizer step, balancing without an auxiliary loss. 0, as in published RL: the biases stay."""
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = "auto"
    """Transformer Engine's attention kernel. Without Transformer Engine torch's kernel is used, and this must be
    auto."""

    def _check(self):
        passthrough.check_megatron_core("megatron", self.extra, type(self).model_fields)
        chosen, of_full = self.recompute_granularity, ("recompute_method", "recompute_num_layers")
        for key in of_full if chosen == "full" else ():
            if getattr(self, key) is None:
                raise at(key, "full recompute needs it, such as recompute_method=uniform recompute_num_layers=1")
        self.unused(chosen != "full", "unless recompute_granularity is full", *of_full, "distribute_saved_activations")
        self.unused(chosen != "selective", "unless recompute_granularity is selective", "recompute_modules")


class Optimizer(Section, extra="allow"):
    """Fields of megatron-core's OptimizerConfig and OptimizerParamScheduler, for Adam with decoupled weight decay."""

    lr: Positive = 1e-6
    """Learning rate after the warmup."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of a linear or cosine decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: Natural = 0
    """Optimizer steps over which the rate rises linearly from 0."""
    lr_decay_steps: Count | None = None
    """Optimizer steps until the decay ends. None: those of the run."""
    weight_decay: NonNegative = 0.0
    """Not applied to biases and norms."""
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    adam_eps: Positive = 1e-8
    clip_grad: NonNegative = 1.0
    """Maximum norm of the whole gradient; 0 does not clip."""
    use_distributed_optimizer: bool = True
    """Split the optimizer's state over the data-parallel ranks."""

    def _check(self):
        passthrough.check_megatron_core("optimizer", self.extra, type(self).model_fields)
        constant = self.lr_decay_style == "constant"
        self.unused(constant, "with lr_decay_style constant: choose linear or cosine", "min_lr", "lr_decay_steps")
        if self.min_lr > self.lr:
            raise at("min_lr", f"{self.min_lr} is above lr, {self.lr}")


class Batching(Section):
    micro_batch_tokens: Count = 4096
    """Tokens of a micro-batch, prompts included. Activation memory grows with it."""
    forward_only_tokens: Count | None = None
    """The same for passes without a backward pass. None: twice micro_batch_tokens."""
    pack_sequences: bool = True
    """Concatenate sequences without padding. false: rectangular micro-batches, padded to the longest."""
    share_prompts: AutoOrOff = "auto"
    """auto: the model computes a prompt once for all its responses in a micro-batch, except with context parallelism or
    without pack_sequences. off: it computes the prompt for each response."""
    skip_zero_advantages: AutoOrOff = "auto"
    """auto: training does not compute responses whose advantages are all zero, such as those of a group with equal
    rewards, if their loss has no other part with a gradient. They count in every denominator, so the gradient is the
    same. off, or with megatron.moe_router_bias_update_rate: training computes all responses."""
    logprob_block_mib: Count = 64
    """Size of the block in which logits are computed; one block exists at a time. Large ones suit GPUs, such as 256."""

    @property
    def tokens_without_backward(self) -> int:
        return self.forward_only_tokens or 2 * self.micro_batch_tokens

    def why_not_shared(self, context_parallel_size: int, model: str = "") -> str:
        """The reason why responses do not share their prompt; empty if they do. `model`: the model's reason."""
        if self.share_prompts == "off":
            return "batching.share_prompts is off"
        if not self.pack_sequences:
            return "batching.pack_sequences is false"
        return "context parallelism cuts each sequence" if context_parallel_size > 1 else model


def _check_template(template: str | None) -> None:
    if template is not None and "{" not in template and template not in datasets.TEMPLATES:
        meant = hint(template, datasets.TEMPLATES)
        raise at("prompt_template", f"{template!r} has no {{field}} and is not a template's name.{meant}")


class Source(Section):
    """One data set. A recipe may give only its path: `train: rows.jsonl`, `train: math`, `train: hub:org/name`."""

    path: FilePath
    """A .parquet, .arrow, .jsonl, .json, .csv or .txt file; a folder of such files; `hub:organisation/name` or
    `hub:organisation/name@revision` on the Hugging Face hub; the name of an adapter, for its data set on the hub; or a
    function `my_file.py:name` of (split, limit), which returns rows, the same at each call."""
    adapter: str | None = None
    """The data set whose fields the rows have: gsm8k, math, humaneval ... (docs/data.md). None: the rows have a prompt
    field and an answer field."""
    split: str | None = None
    """For a folder or a hub name: the split to read, by the files' names. For a function: what it knows. None: the
    source's key in the recipe."""
    subset: str | None = None
    """For a folder or a hub name: a configuration that its README.md declares; else read only files in the folder of
    this name, or whose name begins with it."""
    files: str | None = None
    """For a folder or a hub name: a pattern of the files to read, such as "test6.jsonl" or "data/*.parquet"."""
    streaming: bool = False
    """For a hub name, with limit: read the first rows over the network, without a copy on the disk."""
    prompt_field: str | None = None
    """None: data.prompt_field."""
    answer_field: str | None = None
    """None: data.answer_field."""
    prompt_template: str | None = None
    """None: data.prompt_template; for a benchmark that is not mathematics, its adapter's."""
    limit: Count | None = None
    """Use only this many rows, from the first. None: data.limit."""
    samples: Count | None = None
    """For a benchmark: responses per problem. None: evaluation.samples."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value):
        """Complete `train: math` and `train: {adapter: math}` to the adapter's data set on the hub."""
        value = {"path": value} if isinstance(value, str) else value
        if not isinstance(value, dict):
            return value
        name = value.get("path") or value.get("adapter")
        known = datasets.DATASETS.get(name) if isinstance(name, str) else None
        if known is None or known.hub is None:
            return value
        where = {"path": datasets.HUB + known.hub, "subset": known.subset, "files": known.files}
        chosen = {key: value[key] for key in ("subset", "files") if value.get(key)}
        return {"adapter": name} | value | where | chosen

    def _check(self):
        _check_template(self.prompt_template)
        if self.adapter:
            if self.adapter not in datasets.DATASETS:
                raise at("adapter", f"there is no adapter {self.adapter!r}.{hint(self.adapter, datasets.DATASETS)}")
            self.unused(True, f"with an adapter: {self.adapter} knows its fields", "prompt_field", "answer_field")
        if self.path.startswith(datasets.HUB) and not datasets.HUB_NAME.fullmatch(self.path):
            raise at("path", f"{self.path!r} is no hub name, hub:organisation/name or hub:organisation/name@revision")
        if self.path in datasets.DATASETS:
            raise at("path", f"the Hugging Face hub does not have {self.path} in this form: give the path of its files")
        is_file = not self.on_hub and datasets.suffix_of(self.path) is not None
        generated = datasets.CODE.fullmatch(self.path) is not None
        why = f"for a file: name the file of that part instead of {self.path}"
        parts = self._parts()
        whole = parts != [("train", parts[0][1])] or parts[0][1] is None  # no slice of all rows
        self.unused(is_file and whole, why, "split")
        self.unused(not self.on_hub, "of data that is here already; it is for hub names", "streaming")
        if self.streaming and (any(cut for _, cut in parts) or self.limit is None):
            raise at("streaming", "reads the first rows: give their number by limit, and no slice of a split")
        self.unused(generated or is_file, why, "subset", "files")
        self.unused(generated, "with a function, which returns rows with our fields", "adapter")
        self.unused(self.files and whole, "together with files, which selects the files to read", "split")

    def _parts(self) -> list[tuple[str, str | None]]:
        try:
            return datasets.split_parts(self.split) if self.split else [("", None)]
        except ValueError as error:
            raise at("split", str(error)) from None

    @property
    def on_hub(self) -> bool:
        return self.path.startswith(datasets.HUB)


class Data(Section):
    train: Source
    validation: Source | None = None
    """Evaluated every evaluation.every steps. Offline, None: the held-out problems of the store."""
    test: Source | None = None
    """Evaluated before the first step and after the last."""
    prompt_field: str = "question"
    answer_field: str = "answer"
    """RL: the reference answer for the verifier. SFT: the text to learn. Not used for data sets with an adapter."""
    image_field: str | None = None
    """The column of a prompt's images: one or a list, as `datasets` stores them, paths, bytes or base64. Each takes the
    place of an <image> in the prompt; without any they come before its text. Needs a chat template."""
    min_image_pixels: Annotated[int, Field(ge=1, le=MOST_PIXELS)] | None = None
    """Smaller images are scaled up to this many pixels. None: as the model's processor says."""
    max_image_pixels: Count | None = None
    """Larger images are scaled down to this many pixels. None: as the model's processor says."""
    teacher_field: str | None = None
    """Distillation from several teachers: the field of a row of data.train that has its teacher's name."""
    prompt_template: str | None = None
    """A format string over the row's fields, such as "Q: {question}\\nA:", or the name of one: boxed, fpa.
    None: the adapter's, or the unchanged prompt field."""
    chat: bool = False
    """Format the prompt with the tokenizer's chat template, as the user's turn."""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """Variables of the chat template. {enable_thinking: false}: Qwen3 answers without thinking first."""
    max_prompt_tokens: Count = 512
    """Longer prompts are left out, and their number is reported."""
    shuffle: bool = True
    """Draw a new order each epoch, from run.seed."""
    limit: Count | None = None
    """Use only this many rows of each data set, from the first."""

    def _check(self):
        sources = [source for source in (self.train, self.validation, self.test) if source]
        for name in ("train", "validation", "test"):
            if (source := getattr(self, name)) and source.samples:
                raise at(f"{name}.samples", "is for evaluation.benchmarks: set evaluation.samples")
        for key in ("prompt_field", "answer_field"):
            if self.differs(key) and all(source.adapter or getattr(source, key) for source in sources):
                raise at(key, "does nothing: every data set here has its own, or an adapter with its fields")
        self.unused(not self.chat, "without chat: true", "chat_template_kwargs")
        self.unused(not self.image_field, "without image_field", "min_image_pixels", "max_image_pixels")
        if self.image_field and any(source.adapter for source in sources):
            raise at("image_field", "an adapter does not keep a row's images: give a data set without one")
        if (self.min_image_pixels or 0) > (self.max_image_pixels or math.inf):
            raise at("min_image_pixels", f"{self.min_image_pixels} is more than max_image_pixels")
        if taken := CHAT_ARGUMENTS & self.chat_template_kwargs.keys():
            raise at(f"chat_template_kwargs.{min(taken)}", "is set by the program: give the template's variables only")
        _check_template(self.prompt_template)
        template = self.prompt_template and datasets.TEMPLATES.get(self.prompt_template, self.prompt_template)
        used = template is None or re.search(rf"{{{re.escape(self.prompt_field)}\b", template)
        if not used and self.differs("prompt_field"):
            raise at("prompt_field", f"does nothing: data.prompt_template does not have {{{self.prompt_field}}}")


def is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and re.fullmatch(r"http://[^/\s]+(/[^\s?#]*)?", url) is not None
    except ValueError:  # an invalid port
        return False


class Rollout(Section):
    """Sampling of responses, in training and (with evaluation's temperature and number of samples) for pass@1."""

    engine: Literal["auto", *ENGINES] = "auto"  # pyright: ignore[reportInvalidTypeForm]
    """auto: vllm if a supported version is installed, else hf; on a CPU without instructions for bf16 also hf. With it,
    the section vllm is read only where vllm is chosen."""
    placement: Literal["colocated", "process", "server"] = "colocated"
    """colocated: each rank runs an engine in its process. process: separate engine processes, which the ranks start,
    supervise and replace. server: vLLM servers, called over HTTP."""
    processes: Count | None = None
    """Number of engine processes or servers that the run starts. None: one per GPU without a rank or, if there are
    none, one per rank; with vllm.tensor_parallel_size n, one per n of those GPUs or ranks."""
    servers: list[str] = []
    """With placement server: URLs of running servers. Empty: the run starts servers."""
    staleness: Natural = 0
    """Maximum lag of the sampling weights behind the policy that trains on a response, in weight versions, when its
    generation starts. 0: the current policy samples every batch. 1: the next batch is sampled while this one trains.
    n: n batches are pending, and the engine gets new weights in the middle of them."""
    offload_trainer: bool = False
    """With placement colocated: while the engine is awake, gradients are freed and the optimizer's state is in host
    memory, so the engine's cache can be larger. This costs two copies of that state per step and one more sync per
    checkpoint. Training is bit-identical."""
    reserve_gib: Positive = 5.0
    """GiB of a GPU that a colocated vLLM leaves free beside the trainer when it wakes: CUDA contexts, NCCL's buffers,
    gaps of the allocators. The default is above the 4.1 GiB that were still in use after a first sleep in a published
    log (issue 2619 of NeMo-RL)."""
    cache_after_sync: Literal["recompute", "keep"] | None = None
    """Keys and values of unfinished responses after a weight sync. recompute: with the new weights. keep: those of the
    old weights. None: vllm recomputes, hf keeps (the only mode that it supports)."""
    prompts_per_step: Count = 32
    group_size: Count = 8
    """Responses per prompt."""
    max_response_tokens: Count = 512
    temperature: Positive = 1.0
    """Temperature of sampling and of the trainer's log-probs, so that both use the same distribution."""
    top_k: Annotated[int, Field(ge=0, le=MAX_TOP_K)] = 0
    """Sample from the most probable tokens only; 0: from all. The engine reports which tokens it kept (the support),
    and log-probs, entropies and divergences of all models are then over the support."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of these, after min_p, sample from the most probable ones with this mass."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of these, sample from those at least this many times as probable as the most probable one."""
    stop: list[str | int] = []
    """Strings (of one token) or token ids that end a response, in addition to the end-of-sequence token."""
    replay_routes: AutoOrOff = "auto"
    """Mixtures of experts. auto: the trainer computes each token with the experts that the engine used for it (router
    replay), if the engine reports them, as hf does. off: with those that its own routers choose."""
    max_batch_sequences: Count = 512
    """Sequences that an engine decodes together."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of the engine's weights. None: model.precision (bf16 for fp8)."""

    def _check(self):
        colocated, placed = self.placement == "colocated", f"with placement {self.placement}"
        self.unused(colocated, f"{placed}: set that to process or server", "processes")
        self.unused(self.placement != "server", f"{placed}: set that to server", "servers")
        self.unused(not colocated, f"{placed}, whose engines stay awake", "offload_trainer")
        self.unused(not colocated, f"{placed}: it is for a colocated vLLM", "reserve_gib")
        self.unused(self.servers, "together with servers, which the run does not start", "processes")
        if self.placement == "server" and self.engine != "auto" and not ENGINES[self.engine].serves:
            raise at("engine", f"{self.engine} has no server: set placement to process, or engine to vllm")
        if self.cache_after_sync and self.staleness < 2:
            why = "no response is unfinished at a weight sync"
            raise at("cache_after_sync", f"does nothing with staleness {self.staleness}: {why}")
        for name in ("top_p", "min_p"):
            if self.differs(name) and not self.top_k:
                raise at(name, f"needs top_k (at most {MAX_TOP_K}), which bounds the tokens kept for the trainer")
        for url in self.servers:
            if not is_server(url):
                raise at("servers", f"{url!r} is no URL of a server, such as http://node7:8000")
        if len(set(self.servers)) < len(self.servers):
            raise at("servers", "names a server twice")


class Checkpoint(Section):
    every: Natural = 50
    """Steps between checkpoints. 0: only at the end and when a signal stops the run."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""
    asynchronous: bool = True
    """Write while training continues."""


class Wandb(Section):
    project: str = "megatron-rft"
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"
    name: str | None = None
    """None: run.name."""


class Tracking(Section):
    progress: Literal["auto", "plain", "none"] = "auto"
    """auto: a bar on a terminal, lines in a log."""
    wandb: Wandb | None = None
    peak_tflops: Positive | None = None
    """Peak TFLOP/s of one device, for training/mfu. None: the data sheet's for bf16, if the device is known."""
    alarms: bool = True
    """Warn in the log if the metrics of ten steps show a known failure, such as a collapse of the entropy."""
    sampled_steps: Natural = 40
    """RL: number of steps, spread evenly over the run, whose responses the report shows token by token. 0: none."""


class Faults(Section):
    start_limit_s: Positive = 1800.0
    """Seconds that a rank waits for the others at the start, while they connect, load and start engines."""
    step_limit_s: Positive = 1800.0
    """Maximum seconds of a collective in a training step. On GPUs NCCL's watchdog then ends the run."""
    generation_limit_s: Positive = 14400.0
    """Seconds that a rank that has finished its responses waits for the others."""
    checkpoint_limit_s: Positive = 3600.0
    """Seconds that a rank waits for the others while a checkpoint is written or read."""
    hang_s: Positive | None = None
    """Seconds without progress of any rank after which the launcher names the hung rank and ends the run; the start has
    start_limit_s instead. None: ten times the longest pause so far of the current phase, at least 300; the limits above
    until the phase has had one. A run of one rank is watched only if this or --nproc is given."""
    max_skipped_steps: Natural = 3
    """Maximum consecutive optimizer steps that are skipped because the loss or the gradient is not finite."""
    engine_start_s: Positive = 600.0
    """Seconds within which an engine process must be ready."""
    engine_silence_s: Positive = 300.0
    """Seconds without progress after which an engine process counts as hung and is replaced."""
    mismatch_kl: NonNegative = 0.05
    """Alarm if the KL between engine and trainer, from log-probs of the same tokens, is above this. 1e9: never."""
    mismatch_share: ShareOrAll = 0.25
    """The same for the share of tokens whose log-probs differ by more than 0.1. 1: never."""
    on_mismatch: Literal["warn", "stop"] = "warn"
    """warn: an alarm writes a line to the log. stop: it ends the run."""
    compare_weights_every: Natural = 0
    """Steps between bitwise comparisons of all engine weights with the trainer's. 0: only before the first step."""
