"""Communication that overlaps with computation, the default on GPUs: the same training, bit for bit, here over gloo.
tests/parity/test_overlap.py has several buckets of gradients."""

from safetensors.torch import load_file

from tests.integration.tiny import train, write_recipe

OVERLAPS = ("megatron.overlap_grad_reduce=true", "megatron.overlap_param_gather=true")


def test_two_ranks_train_the_same_with_and_without_overlap(tmp_path):
    found = []
    for name, options in (("none", ()), ("overlap", OVERLAPS)):
        folder = tmp_path / name
        folder.mkdir()
        recipe = write_recipe(folder, run={"steps": 3}, model={"precision": "bf16"}, checkpoint={"every": 2})
        status, output = train(recipe, "--nproc", "2", *options)
        assert status == 0, output
        found.append(load_file(folder / "run/export/model.safetensors"))
    assert all(value.equal(found[1][name]) for name, value in found[0].items())
