"""Threads, memory and matrix products of a process: what is set, and that the environment's word stands."""

import os
from pathlib import Path

import pytest

from tests.harness import start


def tuned(ranks, cores):
    """What was set, and what it came to in Paddle's OpenMP and MKL, and in a job's settings."""
    import ctypes
    from pathlib import Path

    import paddle

    from ppfleet.cpu import tuning

    if cores:  # bound to some, of which its parent has more
        os.sched_getaffinity = lambda pid: set(range(cores if pid == 0 else 64))
    tuning.cgroup_cores = lambda: 64.0
    said = tuning.tune(ranks)
    libraries = [
        ctypes.CDLL(str(Path(paddle.__file__).parent / f"libs/{name}.so")) for name in ("libiomp5", "libmklml_intel")
    ]
    used = [libraries[0].omp_get_max_threads(), libraries[1].MKL_Get_Max_Threads()]
    return [said, used, os.environ.get("MKL_DEBUG_CPU_TYPE", ""), libraries[0].kmp_get_blocktime()]


def tune(tmp_path, ranks=1, cores=0, **env):
    (end,) = start(tuned, 1, tmp_path, ranks, cores, env={"OMP_NUM_THREADS": "", "PPFLEET_THREADS": "", **env}).wait()
    return end


LAUNCHED = {"PADDLE_TRAINER_ID": "0", "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:6170", "PADDLE_LOG_DIR": "log"}
CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("threads", "ranks", "cores", "env"),
    [
        (CORES, 1, 0, {}),
        (max(1, CORES // 2), 2, 0, {}),
        (1, 100, 0, {}),
        (CORES + 1, 1, 0, {"OMP_NUM_THREADS": str(CORES + 1)}),
        (1, 1, 0, {"OMP_NUM_THREADS": "1"}),
        (CORES, 1, 0, {"OMP_NUM_THREADS": "1", **LAUNCHED}),  # the launcher's 1 is nobody's wish
        (3, 2, 0, {"OMP_NUM_THREADS": "5", "PPFLEET_THREADS": "3"}),
        (4, 2, 4, {}),
    ],
)
def test_threads(tmp_path, threads, ranks, cores, env):
    end = tune(tmp_path, ranks, cores, **env)
    assert end.value is not None, end.output
    assert (end.value[0]["threads"], end.value[1]) == (threads, [threads, min(threads, CORES)])


def test_what_the_environment_says_stays(tmp_path):
    said, _, mkl, spin = tune(tmp_path, MALLOC_ARENA_MAX="2", MKL_DEBUG_CPU_TYPE="4", KMP_BLOCKTIME="77").value
    assert said["idle"] == "as KMP_BLOCKTIME says" and spin == 77
    assert said["malloc"] == "as MALLOC_ARENA_MAX says" and said["mkl"] == "as MKL_DEBUG_CPU_TYPE says" and mkl == "4"
    code, text = tune(tmp_path, PPFLEET_THREADS="many").error
    assert code == "WorldError" and "PPFLEET_THREADS must be a positive number of threads, got 'many'" in text


def test_idle_threads_do_not_spin(tmp_path):
    said, _, _, spin = tune(tmp_path).value
    assert said["idle"] == "after 1 ms" and spin == 1


def limits(root):
    from ppfleet.cpu.tuning import cgroup_cores

    return [str(cgroup_cores(f"{root}/{name}")) for name in ("two", "one", "none")]


def test_limits_of_a_container(tmp_path):
    files = {
        "two/proc/self/cgroup": "0::/pod/app\n",
        "two/sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
        "two/sys/fs/cgroup/pod/app/cpu.max": "max 100000\n",
        "one/proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/app\n",
        "one/sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_quota_us": "300000\n",
        "one/sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_period_us": "100000\n",
        "none/proc/self/cgroup": "0::/\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (end,) = start(limits, 1, tmp_path / "out", str(tmp_path)).wait()
    assert end.value == ["1.5", "3.0", "inf"], end.output


def in_settings(path):
    import json

    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device="cpu")
    net = blocks.mlp()
    job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    for points, labels in job.steps(job.loader(blocks.Points(16), 8)):
        job.backward(F.cross_entropy(net(points), labels))
    return json.loads((job.directory / "settings.json").read_text())["defaults"]


def test_it_is_printed_and_stored(tmp_path):
    running = start(in_settings, 2, tmp_path / "out", str(tmp_path / "run"))
    ends = running.wait()
    assert [end.value and end.value["threads"] for end in ends] == [1, 1], ends[0].output
    assert (
        "defaults: threads=1, idle=after 1 ms, malloc=keeps memory" in ends[0].output
        and "operators=ppfleet's" in ends[0].output
    )


def kept(wanted):
    """Page faults of writing 64 MB that were allocated and freed before, and what Linux backs them with."""
    import ctypes
    import resource

    from ppfleet.cpu import tuning

    said = tuning.tune(1)["malloc"] if wanted else "untouched"
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        memory = libc.malloc(ctypes.c_size_t(64 << 20))
        ctypes.memset(memory, 1, 64 << 20)
        libc.free(ctypes.c_void_p(memory))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    sizes = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return said, faults, int(sizes["AnonHugePages"].split()[0])


def test_memory_is_kept(tmp_path):
    (tuned,), (stock,) = (start(kept, 1, tmp_path / str(wanted), wanted).wait() for wanted in (True, False))
    assert tuned.value is not None and stock.value is not None, tuned.output + stock.output
    assert tuned.value[1] < 100 < 1000 < stock.value[1], (tuned.value, stock.value)
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if pages.exists() and "[never]" not in pages.read_text():
        assert tuned.value[0] == "keeps memory, in large pages" and tuned.value[2] >= 32 << 10, tuned.value
