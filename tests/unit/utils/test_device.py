"""Statements about this machine's GPU without torch, with simulated device files and versions."""

import sys
from pathlib import Path

import pytest

from megatron_rft.commands.doctor import other_cudnn
from megatron_rft.utils import device
from megatron_rft.utils.errors import ConfigError


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """The output of code on a machine with one GPU, in a process that has not imported torch."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(device, "DEVICES", tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_is_seen_unless_it_is_hidden(machine, monkeypatch, hidden):
    assert device.has_cuda_device()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert not device.has_cuda_device()


def test_the_control_file_alone_is_no_gpu(machine):
    (machine / "nvidia0").rename(machine / "nvidiactl")
    assert not device.has_cuda_device()


class Driver:
    """NVML on a machine with these GPUs, by their bytes; those of None do not say."""

    def __init__(self, *gpus):
        self.gpus = gpus

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.gpus)

    def nvmlDeviceGetHandleByIndex_v2(self, index, gpu):
        gpu._obj.value = index + 1

    def nvmlDeviceGetMemoryInfo(self, gpu, memory):
        memory[0] = self.gpus[gpu.value - 1] or 1 << 50
        return 0 if self.gpus[gpu.value - 1] else 3


@pytest.mark.parametrize("gpus, gib", [((80 << 30, 4 << 30, None), 80.0), ((None,), None), ((), None)])
def test_the_memory_of_the_largest_gpu(machine, monkeypatch, gpus, gib):
    monkeypatch.setattr(device.ctypes, "CDLL", lambda _: Driver(*gpus))
    assert device.gpu_gib() == gib
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.gpu_gib() is None


def test_without_a_driver_the_memory_is_unknown(machine):
    assert device.gpu_gib() is None


def test_a_cpu_build_of_torch_does_not_leave_a_gpu_unused(machine, monkeypatch):
    monkeypatch.setattr(device.metadata, "version", lambda name: "2.13.0+cpu")
    with pytest.raises(
        ConfigError, match="torch 2.13.0.cpu is a CPU build, and this machine has an NVIDIA GPU: .*gpu`"
    ):
        device.check_torch_build()
    monkeypatch.setattr(device.metadata, "version", lambda name: "2.13.0")
    device.check_torch_build()


def test_transformer_engine_without_its_extension_is_none(tmp_path, monkeypatch):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)

    def missing(name):
        raise device.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(device.metadata, "version", missing)
    assert not device.has_transformer_engine()
    (tmp_path / "transformer_engine" / "transformer_engine_torch.cpython-311.so").touch()
    assert device.has_transformer_engine()


def test_a_second_cudnn_is_found(monkeypatch, tmp_path):
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    wheels = "\tlibcudnn.so.9 (libc6,x86-64) => /opt/rft/lib/python3.12/site-packages/nvidia/cudnn/lib/libcudnn.so.9\n"
    image = "\tlibcudnn.so.9 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcudnn.so.9\n"
    assert other_cudnn(wheels + "\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/libcuda.so.1\n") == []
    assert other_cudnn(wheels + image) == ["/usr/lib/x86_64-linux-gnu"]
    (tmp_path / "libcudnn.so.9").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    assert other_cudnn(wheels) == [str(tmp_path)]


def test_the_image_brings_no_cudnn_of_its_own():
    lines = (Path(__file__).resolve().parents[3] / "launch/Dockerfile").read_text().splitlines()
    (base,) = [line for line in lines if line.startswith("FROM")]
    assert "cudnn" not in base and any("other_cudnn()" in line for line in lines)
