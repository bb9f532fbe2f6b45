"""Every launch flag of the documents, with valid and invalid values. Nothing is started."""

import pytest

from ppfleet.commands.launch import env_secrets, flags
from ppfleet.commands.launch.flags import Machine
from ppfleet.errors import WorldError

PAIR = "192.168.0.1,192.168.0.2"


def own(hosts, env):
    if "192.168.0.2" in hosts:
        return "192.168.0.2"
    raise WorldError("none of them is an address of this machine")


INTERFACES = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "=eth7"}


def machine(cards=0, built=False, env=None):
    found = {"192.168.0.2": "eth7", "127.0.0.2": "lo"}
    return Machine(
        cards, built, env or {}, own=own, interface_of=lambda host: found.get(host, ""), toward=lambda _: "192.168.0.2"
    )


def translated(*words, **more):
    return flags.translate([*words, "train.py", "--epochs", "1"], machine(**more))


def refused(capsys, *words, **more):
    with pytest.raises(SystemExit) as end:
        translated(*words, **more)
    assert end.value.code == 2
    return capsys.readouterr().err


def on_cpu(devices):
    return {"CUDA_VISIBLE_DEVICES": devices, "PADDLE_DISTRI_BACKEND": "gloo"}


@pytest.mark.parametrize(
    ("words", "arguments", "env"),
    [
        ([], ["--nproc_per_node=1"], {}),
        (["--nproc_per_node", "2"], ["--nproc_per_node=2"], {}),
        (["--gpus=0,1"], ["--gpus=0,1"], on_cpu("0,1")),
        (["--selected_gpus", "0,1"], ["--gpus=0,1"], on_cpu("0,1")),
        (["--gpus", "1", "--nproc_per_node=1"], ["--gpus=1"], on_cpu("1")),
        (["--master", "a:8090", "--nnodes=2"], ["--master=a:8090", "--nnodes=2", "--nproc_per_node=1"], INTERFACES),
        (["--use_paddlecloud", "--job_id", "j"], ["--nproc_per_node=1", "--job_id=j"], {}),
    ],
)  # fmt: skip
def test_one_machine(words, arguments, env):
    launch = translated(*words)
    assert [word for word in launch.arguments if not word.startswith("--log_dir")] == arguments
    assert launch.env == env and launch.script == ("train.py", "--epochs", "1")
    assert launch.nodes == (("a", "another machine") if "--master" in words else ())


@pytest.mark.parametrize(
    "ips", [["--ips", PAIR], [f"--ips={PAIR}"], ["--cluster_node_ips", PAIR], [f"--cluster_node_ips={PAIR}"]]
)
@pytest.mark.parametrize("host", [[], ["--host=192.168.0.2"], ["--node_ip", "192.168.0.2"]])
def test_several_machines(ips, host):
    launch = translated(*ips, *host, "--nproc_per_node=2", env={"FLAGS_START_PORT": "17000"})
    assert launch.arguments == (
        f"--ips={PAIR}", "--host=192.168.0.2", "--nproc_per_node=2", "--start_port=17000", "--log_dir=log",
    )  # fmt: skip
    assert launch.env == INTERFACES
    assert (launch.nodes, launch.host, launch.ports) == (("192.168.0.1", "192.168.0.2"), "192.168.0.2", (17000, 17001))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus=a"], "--gpus must list different cards such as 0,1, got 'a'"),
        (["--gpus=0,0"], "--gpus must list different cards such as 0,1, got '0,0'"),
        (["--selected_gpus="], "--gpus must list different cards such as 0,1, got ''"),
        (["--gpus=0,1", "--nproc_per_node=3"], "--gpus=0,1 starts 2 processes, but --nproc_per_node=3"),
        (["--nproc_per_node=0"], "must be an integer from 1 to 1024, got '0'"),
        (["--nproc_per_node=two"], "must be an integer from 1 to 1024, got 'two'"),
        (["--ips=192.168.0.1, 192.168.0.2"], "without spaces, got ' 192.168.0.2'"),
        (["--ips=192.168.0.2,192.168.0.2"], "lists a machine twice"),
        (["--ips="], "--ips must list addresses or host names as A,B without spaces, got ''"),
        (["--ips=192.168.0.8,192.168.0.9"], "none of them is an address of this machine"),
        (["--cluster_node_ips=a b"], "without spaces, got 'a b'"),
        ([f"--ips={PAIR}", "--host=192.168.0.7"], "--host=192.168.0.7 is not one of 192.168.0.1"),
        ([f"--ips={PAIR}", "--node_ip=192.168.0.1"], "--host=192.168.0.1 is not an address of this machine"),
        ([f"--ips={PAIR}", "--nnodes=3"], "lists 2 machines, but --nnodes=3"),
        ([f"--ips={PAIR}", "--master=192.168.0.1:8090"], "give one of them, not both"),
        (["--start_port=80"], "must be an integer from 1025 to 64999, got '80'"),
        (["--start_port=port"], "got 'port'"),
        (["--master=192.168.0.1", "--nnodes=2"], "--master must be address:port, got '192.168.0.1'"),
        (["--master=192.168.0.1:8090"], "--master and --nnodes must be given together"),
        (["--nnodes=2"], "--master and --nnodes must be given together"),
        (["--master=192.168.0.1:8090", "--nnodes=some"], "--nnodes must be a number of machines, got 'some'"),
        (["--master=192.168.0.1:8090", "--nnodes=1:2"], "needs Paddle's elastic mode with etcd: start it"),
        (["--master=etcd://192.168.0.1:2379", "--nnodes=2"], "is Paddle's elastic mode with etcd: start it"),
        (["--restarts=-1"], "must be an integer from 0 to 1000, got '-1'"),
        (["--wait=soon"], "must be a number >= 1, got 'soon'"),
        (["--server_num=x", "--worker_num=1"], "--server_num must be a number, got 'x'"),
        (["--servers=a,b", "--workers=a:1"], "--servers must be a list address:port,address:port, got 'a,b'"),
        (["--servers=a:1,b:2", "--workers=a b"], "--workers must be a list address:port,address:port, got 'a b'"),
        (["--servers=a:1"], "a parameter-server job needs --server_num and --worker_num"),
        (["--server_num=1"], "a parameter-server job needs --server_num and --worker_num"),
        (["--servers=a:1", "--workers=a:2", "--worker_num=1"], "a parameter-server job needs --server_num and"),
        (["--servers=192.168.0.9:1", "--workers=192.168.0.9"], "none of them is an address of this machine"),
        (["--server_num=2", "--worker_num=2", "--heter_worker_num=2"], "heterogeneous workers are not supported"),
        (["--servers=a:1", "--workers=a:2", "--heter_workers=a:3"], "heterogeneous workers are not supported"),
        (["--server_num=1", "--trainer_num=2"], "--trainer_num: Paddle's launcher never ends"),
        (["--http_port=none", "--server_num=1"], "--http_port must be a number, got 'none'"),
        ([f"--ips={PAIR}", "--server_num=1"], "--ips and --master are for collective training"),
        (["--no_such_flag=1"], "unrecognized arguments: --no_such_flag=1"),
    ],
)
def test_wrong_values(capsys, words, said):
    assert said in refused(capsys, *words)


def test_wrong_start_port_of_the_environment(capsys):
    assert "FLAGS_START_PORT must be a port from 1025 to 64999, got 'http'" in refused(
        capsys, env={"FLAGS_START_PORT": "http"}
    )


def test_on_cards():
    launch = translated("--gpus=0,1", cards=2, built=True)
    assert launch.env == {} and launch.notes == ()
    assert "--nproc_per_node=1" not in translated(cards=2, built=True).arguments  # Paddle takes all cards


def test_cards_under_a_list_of_visible_ones(capsys):
    env = {"CUDA_VISIBLE_DEVICES": "4,5"}
    launch = translated("--gpus=0,1", cards=8, built=True, env=env)  # Paddle: ValueError: '0' is not in list
    assert "--gpus=4,5" in launch.arguments
    assert launch.notes == ("--gpus=0,1 under CUDA_VISIBLE_DEVICES=4,5 means the cards 4,5",)
    assert "--gpus=5" in translated("--gpus=5", cards=8, built=True, env=env).arguments
    assert "CUDA_VISIBLE_DEVICES=4,5 leaves only these" in refused(capsys, "--gpus=0,2", cards=8, built=True, env=env)


def test_the_interface_is_set_with_a_master_too():
    assert translated("--master=192.168.0.1:8090", "--nnodes=2").env == INTERFACES
    assert translated("--master=192.168.0.2:8090", "--nnodes=2").env == INTERFACES


def test_more_cards_than_there_are(capsys):
    assert "--gpus=0,5, but this machine has 2 cards" in refused(capsys, "--gpus=0,5", cards=2, built=True)


def test_a_cards_command_on_a_cpu_says_so():
    assert translated("--gpus=0,1").notes == ("no card here: --gpus=0,1 starts 2 CPU processes",)
    assert "CPU build" in translated("--gpus=0", cards=1).notes[0]
    assert "no effect" in translated("--use_paddlecloud").notes[0]


def test_the_environment_does_not_override_the_flags():
    env = {
        "PADDLE_NNODES": "3",
        "PADDLE_TRAINER_ID": "1",
        "POD_IP": "192.168.0.2",
        "CUDA_VISIBLE_DEVICES": "",
        "A": "1",
    }
    launch = translated(f"--ips={PAIR}", env=env)
    assert set(launch.without) == {"PADDLE_NNODES", "PADDLE_TRAINER_ID", "POD_IP", "CUDA_VISIBLE_DEVICES"}
    assert any("PADDLE_NNODES=3" in note for note in launch.notes)
    assert launch.text().startswith("env -u PADDLE_NNODES")
    kept = translated(env={"PADDLE_MASTER": "192.168.0.1:8090", "PADDLE_NNODES": "2"})  # a cluster's own description
    assert kept.without == ()
    mine = translated(f"--ips={PAIR}", env={"GLOO_SOCKET_IFNAME": "ib0"})
    assert mine.env == {"NCCL_SOCKET_IFNAME": "=eth7"}


def test_parameter_servers():
    launch = translated("--server_num=1", "--worker_num=2", "--http_port=8900")
    assert launch.arguments == ("--server_num=1", "--worker_num=2", "--http_port=8900", "--log_dir=log")
    assert launch.workers == ("", "") and launch.nodes == ()


@pytest.mark.parametrize("workers", ["192.168.0.1,192.168.0.2", "192.168.0.1:6172,192.168.0.2:6173"])
def test_parameter_servers_on_several_machines(workers):
    launch = translated("--servers=192.168.0.1:6170,192.168.0.2:6171", f"--workers={workers}")
    assert launch.arguments[:2] == ("--servers=192.168.0.1:6170,192.168.0.2:6171", f"--workers={workers}")
    assert launch.env == {"POD_IP": "192.168.0.2"} and launch.workers == launch.nodes == ("192.168.0.1", "192.168.0.2")
    assert (launch.host, launch.ports, launch.meeting_port) == ("192.168.0.2", (6171,), 6169)


def test_the_scripts_own_flags_are_its_own():
    launch = flags.translate(["train.py", "--gpus=7", "--ips", "x", "--", "-h"], machine())
    assert launch.script == ("train.py", "--gpus=7", "--ips", "x", "--", "-h")


@pytest.mark.parametrize(
    ("name", "value", "hidden"),
    [
        ("HF_TOKEN", "t", True), ("AWS_SECRET_ACCESS_KEY", "k", True), ("MY_PASSWORD_FILE", "p", True),
        ("DB_PASSWORD", "p", True), ("http_proxy", "http://me:pw@proxy:3128", True), ("API_KEY", "k", True),
        ("https_proxy", "http://proxy:3128", False), ("KEYBOARD", "de", False), ("PATH", "/usr/bin", False),
        ("TOKENIZERS_PARALLELISM", "false", False), ("HF_TOKEN", "", False),
    ],
)  # fmt: skip
def test_secrets(name, value, hidden):
    assert env_secrets.is_secret(name, value) == hidden


def test_secrets_go_through_a_file_of_this_users(tmp_path):
    launch = translated("--nproc_per_node=2")
    command, env = env_secrets.keep(launch, {"HF_TOKEN": "t", "HOME": "/h"}, tmp_path, 1)
    assert "HF_TOKEN" not in env and env["HOME"] == "/h"
    assert command[-4:] == [env_secrets.__file__, "train.py", "--epochs", "1"] and "--log_dir=log/restart_1" in command
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and "HF_TOKEN" in path.read_text()
    assert env_secrets.keep(launch, {"HOME": "/h"}, tmp_path, 0)[0] == launch.command()
