"""Runs on several ranks: converts every family, tied and untied, between Hugging Face's format and megatron-core's, in
every layout.

Both ways with megatron-core itself on the other side: ranks load what `conversion` wrote, and `conversion` reads what
ranks saved. Prints one line per case with the number of tensors that differ in a bit.
"""

import copy
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

import megatron_rft.megatron  # noqa: F401  prepares megatron-core for this host
from megatron_rft.conversion import Mapping, hf_shapes
from megatron_rft.conversion.torch_dist import MegatronFolder
from megatron_rft.conversion.torch_dist_writer import MegatronWriter
from megatron_rft.megatron import model as models
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.checkpoint import prepare_writer
from tests.families import FAMILIES as TEXT
from tests.families import SEEING
from tests.parity.hf_cases import FAMILIES, own_tensors, section
from tests.parity.layouts import shutdown

NEW = TEXT | SEEING
LAYOUTS = {
    "tp1": {},
    "tp2": dict(tp=2),
    "pp2": dict(pp=2),
    "tp2 pp2": dict(tp=2, pp=2),
    "pp2 vpp2": dict(pp=2, vpp=2),
    "ep2": dict(ep=2),
    "tp2 ep2 etp1": dict(tp=2, ep=2, etp=1),
}


def sharded(chunks):
    metadata = ensure_metadata_has_dp_cp_group({})
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}


def fresh(path):
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    dist.barrier()
    return path


def different(pairs, expected):
    found = dict(pairs)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return sum(not torch.equal(found[name].cpu(), tensor) for name, tensor in expected.items())


def case(hf_config, layout, folder, expected):
    """The numbers of tensors that differ: (as ranks load them, as conversion reads what ranks saved)."""
    written = fresh(folder / "written")
    if dist.get_rank() == 0:
        MegatronWriter(written, hf_config, file_bytes=50_000).write(expected.__getitem__)
    dist.barrier()
    megatron = section(**layout)
    chunks = models.build(hf_config, megatron, "fp32")
    found = dist_checkpointing.load(sharded(chunks), str(written))
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(found[f"model{i}"])
    loaded = different(weights.WeightStream(chunks, Mapping(hf_config)), expected)
    saved = fresh(folder / "saved")
    dist_checkpointing.save(sharded(chunks), str(saved))
    source = MegatronFolder(saved, hf_config)
    return loaded, different(((name, source(name)) for name in hf_shapes(hf_config)), expected)


def main():
    folder = Path(sys.argv[1])
    parallel.initialize(section())
    prepare_writer()
    for family, hf_config in (FAMILIES | NEW).items():
        for tied in (True, False):
            if family in NEW and tied:
                continue
            hf_config = copy.deepcopy(hf_config)
            hf_config.tie_word_embeddings = tied
            expected = dict(own_tensors(hf_config))
            for name, layout in LAYOUTS.items():
                if ("ep" in layout and family != "qwen3_moe") or ("vpp" in layout and family != "qwen3"):
                    continue
                # megatron-core has biases of experts without tensor parallelism alone
                if family in NEW and name != ("pp2" if family == "gpt_oss" else "tp2 pp2"):
                    continue
                if "tp" in layout and (family == "qwen3_moe" or family in NEW):
                    layout = {**layout, "sp": True}
                parallel.destroy_layout()
                parallel.initialize(section(**layout))
                counts = case(hf_config, layout, folder, expected)
                if dist.get_rank() == 0:
                    print("CASE", family, "tied" if tied else "untied", name, *counts, sep="\t", flush=True)
    shutdown()


if __name__ == "__main__":
    main()
