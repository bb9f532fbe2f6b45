"""From a text file to commands: argument lists, needs, logs, counts, the device map, nodes. Nothing is started."""

import json
import sys
from collections import Counter

import pytest

from ppfleet.errors import ConfigError
from ppfleet.tipc import config, plan
from ppfleet.tipc.command import LocalMachine
from tests.tipc_files import LONG, SHORT, edited, tipc

LITE = "lite_train_lite_infer"
FLEET = ("gpu_list:0|0,1", "gpu_list:192.168.0.1,192.168.0.2;0,1")


def made(tmp_path, text, mode=LITE, **here):
    path = tmp_path / "file.txt"
    path.write_text(text)
    return plan.make(config.parse(path), mode, LocalMachine(**here))


def stages(plan):
    return Counter(command.stage for command in plan.commands)


def only(plan, stage):
    return [command for command in plan.commands if command.stage == stage]


def test_the_short_forms_chain(tmp_path):
    root = f"./test_tipc/output/toy/{LITE}"
    run = f"{root}/norm_train_gpus_0,1_nodes_1"
    wanted = {
        "train": ["-m", "paddle.distributed.launch", "--gpus=0,1",
                  f"--log_dir={root}/logs/norm_train_gpus_0,1_nodes_1.launch", "train.py", f"--output-dir={run}",
                  "--epochs=5", "--batch-size=4", "--data-path=./data", "--use-gpu=True"],
        "eval": ["eval.py", f"--pretrained={run}/latest.pdparams", "--data-path=./data", "--use-gpu=True"],
        "export": ["export.py", f"--pretrained={run}/latest.pdparams", f"--save-inference-dir={run}"],
        "infer": ["infer.py", "--use-gpu=True", f"--model-dir={run}", "--batch-size=1", "--img-path=./images",
                  "--benchmark=True"],
    }  # fmt: skip
    commands = made(tmp_path, SHORT).commands
    second = {c.stage: c for c in reversed(commands) if c.run == "norm_train_gpus_0,1_nodes_1"}
    for stage, arguments in wanted.items():
        assert second[stage].argv == (sys.executable, *arguments), stage
    ids = {stage: f"norm_train_gpus_0,1_nodes_1.{stage}" for stage in wanted}
    assert second["train"].needs == () and second["eval"].needs == second["export"].needs == (ids["train"],)
    assert second["infer"].needs == (ids["export"],)
    first = commands[0]
    assert first.argv[1:3] == ("train.py", f"--output-dir={root}/norm_train_gpus_0_nodes_1")
    assert dict(first.env) == {"CUDA_VISIBLE_DEVICES": "0"}


def test_counts_and_one_log_a_command(tmp_path):
    no_eval = edited(LONG, ("eval:tools/eval.py -c configs/rec.yml -o", "eval:null"))
    for text, cards, train, evaluation, infer in [
        (SHORT, True, 2, 2, 8),
        (SHORT, False, 2, 2, 8),
        (LONG, True, 2, 2, 24),  # 2 runs x (CPU: 2 mkldnn x 2 threads x 2 batch sizes; GPU: 2 TensorRT x 2 batch sizes)
        (LONG.replace("fp32", "fp32|fp16|int8"), True, 2, 2, 2 * (20 + 6)),
        (LONG.replace("auto_cast:null", "auto_cast:fp32|amp"), True, 4, 4, 48),
        (no_eval, True, 2, 0, 24),
    ]:
        done = made(tmp_path, text, cards=cards)
        assert stages(done) == Counter(train=train, eval=evaluation, export=train, infer=infer)
        assert (
            len({command.log for command in done.commands}) == len(done.commands) == len({c.id for c in done.commands})
        )


def test_the_long_forms_arguments(tmp_path):
    commands = made(tmp_path, LONG).commands
    root = f"./test_tipc/output/rec/{LITE}"
    run = f"{root}/norm_train_gpus_0_autocast_null_nodes_1"
    train, evaluation, export, infer = (
        next(c for c in commands if c.stage == s) for s in ("train", "eval", "export", "infer")
    )
    assert train.argv[1:] == (
        "tools/train.py", "-c", "configs/rec.yml", "-o", "Global.print_batch_step=1", f"Global.save_model_dir={run}",
        "Global.epoch_num=2", "Train.loader.batch_size_per_card=16", "Global.use_gpu=True",
    )  # fmt: skip
    assert evaluation.argv[4:] == ("-o", f"Global.pretrained_model={run}/latest", "Global.use_gpu=True")
    assert export.argv[-2:] == (f"Global.checkpoints={run}/latest", f"Global.save_inference_dir={run}")
    assert "--rec_image_shape=3,48,320" in infer.argv and f"--rec_model_dir={run}/Student" in infer.argv
    assert "--image_dir=./inference/images" in infer.argv and not any("save_log_path" in word for word in infer.argv)
    cpu = next(c for c in commands if "infer_cpu" in c.id)
    assert cpu.id.endswith("infer_cpu_usemkldnn_True_threads_1_precision_fp32_batchsize_1")
    assert {"--enable_mkldnn=True", "--cpu_threads=1", "--use_gpu=False"} <= set(cpu.argv)


def test_a_key_of_two_words_is_two_arguments(tmp_path):
    text = LONG.replace("Global.epoch_num:", "-o Global.epochs:").replace(
        "Global.use_gpu:True|True", "-o Global.device:gpu"
    )
    train = made(tmp_path, text).commands[0]
    place = train.argv.index("Global.epochs=2")
    assert train.argv[place - 1] == "-o" and train.argv[-2:] == ("-o", "Global.device=gpu")
    assert made(tmp_path, text, cards=False).commands[0].argv[-1] == "Global.device=cpu"


@pytest.mark.parametrize("written", ["./my images/of today", '"./my images/of today"', "'./my images/of today'"])
def test_a_value_is_one_argument(tmp_path, written):
    text = edited(SHORT, ("--img-path:./images", f"--img-path:{written}"))
    assert "--img-path=./my images/of today" in made(tmp_path, text, output="./my output").commands[3].argv
    assert (
        f"--output-dir=./my output/toy/{LITE}/norm_train_gpus_0_nodes_1"
        in made(tmp_path, text, output="./my output").commands[0].argv
    )


def test_a_file_without_a_trainer_is_for_inference_alone(tmp_path):
    text = edited(LONG, ("trainer:norm_train", "trainer:null"))
    assert stages(made(tmp_path, text, "whole_infer")) == {"infer": 12}
    with pytest.raises(ConfigError, match="line 15 .* must name a trainer"):
        made(tmp_path, text)


def test_bare_keys_follow_their_neighbours(tmp_path):
    """Where the other flags are `-o` overrides, as in PaddleDetection, use_gpu is one too."""
    text = LONG.replace("Global.use_gpu:True|True", "use_gpu:True").replace("Global.epoch_num", "epoch")
    assert made(tmp_path, text).commands[0].argv[-1] == "use_gpu=True"
    assert made(tmp_path, SHORT).commands[0].argv[-1] == "--use-gpu=True"


def test_pact_of_the_long_form(tmp_path):
    text = edited(
        LONG,
        ("trainer:norm_train", "trainer:norm_train|pact_train"),
        ("pact_train:null", "pact_train:deploy/slim/quant.py -c configs/rec.yml"),
        ("quant_export:null", "quant_export:deploy/slim/export.py"),
    )
    done = made(tmp_path, text, trainers=("norm_train", "pact_train"))
    assert stages(done) == {"train": 4, "eval": 4, "export": 4, "infer": 48}
    assert [c.argv[1] for c in only(done, "export")] == ["tools/export_model.py", "deploy/slim/export.py"] * 2
    refused = [c for c in made(tmp_path, text).commands if c.refused]
    assert [c.run for c in refused] == [f"pact_train_gpus_{g}_autocast_null_nodes_1" for g in ("0", "0,1")]
    assert all(c.stage == "train" and "pact_train" in c.refused for c in refused)


def test_fleet(tmp_path):
    text = edited(SHORT, FLEET)
    first, second = (made(tmp_path, text, address=f"192.168.0.{n}", interface="eth7", start_port=17000) for n in (1, 2))
    for done, number in ((first, 1), (second, 2)):
        train = done.commands[0]
        assert train.argv[1:5] == ("-m", "paddle.distributed.launch", "--ips=192.168.0.1,192.168.0.2", "--gpus=0,1")
        assert dict(train.env) == {
            "POD_IP": f"192.168.0.{number}", "GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth7",
            "PADDLE_START_PORT": "17000",
        }  # fmt: skip
        assert train.run == "norm_train_gpus_0,1_nodes_2" and not train.skip
    assert not any(c.skip for c in first.commands)
    assert {c.skip for c in second.commands[1:]} == {"the model is on 192.168.0.1"}


def test_one_device_per_node_goes_through_the_launcher(tmp_path):
    train = made(tmp_path, edited(SHORT, ("gpu_list:0|0,1", "gpu_list:10.0.0.1,10.0.0.2;0"))).commands[0]
    assert train.argv[2:5] == ("paddle.distributed.launch", "--ips=10.0.0.1,10.0.0.2", "--gpus=0")


def test_what_a_file_repeats_has_names_of_its_own(tmp_path):
    text = edited(SHORT, ("gpu_list:0|0,1", "gpu_list:0|0"), ("--use-gpu:True|False", "--use-gpu:False|null"))
    commands = made(tmp_path, text.replace("--batch-size:1|4", "--batch-size:1|1")).commands
    assert len({c.id for c in commands}) == len({c.log for c in commands}) == len(commands) == 2 * (3 + 2)
    many = made(tmp_path, edited(SHORT, ("gpu_list:0|0,1", f"gpu_list:{','.join(map(str, range(100)))}")))
    assert max(len(c.id) for c in many.commands) < 200


def test_one_machines_run_is_made_once(tmp_path):
    text = edited(SHORT, ("gpu_list:0|0,1", "gpu_list:0|a,b;0|a;0,1"))
    skips = [[c.skip for c in only(made(tmp_path, text, address=name), "train")] for name in "ab"]
    assert skips == [["", "", ""], ["this run is done on a", "", "this run is done on a"]]


def test_the_device_map(tmp_path):
    text = edited(SHORT, ("norm_train:train.py", "norm_train:train.py --device=gpu --device gpu --use_gpu=1"))
    done = made(tmp_path, text, cards=False)
    alone, pair = only(done, "train")
    assert (
        alone.argv[2:6] == ("--device=cpu", "--device", "cpu", "--use_gpu=False")
        and alone.argv[-1] == "--use-gpu=False"
    )
    assert "--gpus=0,1" in pair.argv and pair.note == "no card here: gpus 0,1 are 2 CPU processes"
    assert dict(pair.env) == {"CUDA_VISIBLE_DEVICES": "0,1", "PADDLE_DISTRI_BACKEND": "gloo"}
    assert all("--use-gpu=False" in c.argv and c.device == "cpu" for c in only(done, "infer"))
    assert "norm_train_gpus_0_nodes_1.infer_gpu_on_cpu_batchsize_1" in [c.id for c in done.commands]
    special = [c for c in only(made(tmp_path, LONG, cards=False), "infer") if "usetrt_True" in c.id]
    assert len(special) == 4 and {c.skip for c in special} == {"no card here, and TensorRT needs one"}
    amp = SHORT.replace("norm_train", "amp_train")
    assert "mixed precision needs a card" in made(tmp_path, amp, cards=False).commands[0].note


def test_whole_infer(tmp_path):
    commands = made(tmp_path, SHORT, "whole_infer").commands
    assert commands[0].argv[1:] == ("export.py", "--pretrained=./weights.pdparams", "--save-inference-dir=./exported")
    assert [c.stage for c in commands] == ["export", *["infer"] * 4]
    assert "--model-dir=./exported" in commands[1].argv
    plain = made(tmp_path, LONG, "whole_infer").commands
    assert {c.stage for c in plain} == {"infer"} and "--rec_model_dir=./inference/rec/" in plain[0].argv


def test_benchmark_train(tmp_path):
    tail = "=====train_benchmark_params=====\nbatch_size:16|32\nfp_items:{}\nepoch:1\n"
    commands = made(tmp_path, SHORT + tail.format("fp32"), "benchmark_train").commands
    assert [(c.stage, c.batch_size, c.shows) for c in commands] == [("train", b, "ips") for b in ("16", "32")] * 2
    assert {"--epochs=1", "--batch-size=32"} <= set(commands[1].argv)
    long = made(tmp_path, LONG + tail.format("fp32|fp16"), "benchmark_train").commands
    assert len(long) == 8 and {"Global.auto_cast=fp32", "Global.auto_cast=amp"} <= {w for c in long for w in c.argv}
    for wrong in ("fp64", "null", ""):
        with pytest.raises(ConfigError, match="expected fp32 or fp16"):
            made(tmp_path, SHORT + tail.format(wrong), "benchmark_train")
    with pytest.raises(ConfigError, match="fp16 with norm_train"):
        made(tmp_path, SHORT + tail.format("fp16"), "benchmark_train")


@pytest.mark.parametrize(
    ("python", "wanted", "said"),
    [
        ("python", sys.executable, ""),
        ("python3", sys.executable, ""),
        ("python3.7", sys.executable, "python3.7"),
        ("python3.99", "python3.99", ""),
        ("/opt/python/bin/python3.7", "/opt/python/bin/python3.7", ""),
        ("pypy3", "pypy3", ""),
    ],
)
def test_the_interpreter(tmp_path, python, wanted, said):
    done = made(tmp_path, edited(SHORT, ("python:python3.7", f"python:{python}")))
    assert done.commands[0].argv[0] == wanted
    assert [note for note in done.notes if "instead" in note] == [n for n in done.notes if said and n.startswith(said)]


@pytest.mark.parametrize(
    ("changes", "mode", "words"),
    [
        ([], "lite", "unknown mode 'lite'"),
        ([], "klquant_whole_infer", "a mode of another script"),
        ([], "lite_train_whole_infer", "line 6 .* no value for lite_train_whole_infer"),
        ([], "benchmark_train", "train_benchmark_params"),
        ([("train_model:./weights.pdparams", "train_model:null")], "whole_infer", "line 24 .* needs a model"),
        ([("use-gpu:True", "use-gpu:True|True|False")], LITE, "line 5 .* 3 values for 2 entries"),
        ([("train_model_name:latest.pdparams", "train_model_name:")], LITE, "line 10"),
    ],
)
def test_refusals(tmp_path, changes, mode, words):
    with pytest.raises(ConfigError, match=words):
        made(tmp_path, edited(SHORT, *changes), mode)


def test_plan_as_a_command(tmp_path):
    (tmp_path / "fleet.txt").write_text(edited(SHORT, FLEET))
    done = tipc(tmp_path, "plan", "fleet.txt", LITE, "--json", "--device", "gpu")
    commands = json.loads(done.stdout)
    assert [c["stage"] for c in commands] == ["train", "eval", "export", *["infer"] * 4]
    assert all({"argv", "log", "needs"} <= set(c) for c in commands) and "--gpus=0,1" in commands[0]["argv"]
    assert not (tmp_path / "test_tipc").exists()
    lacking = tipc(tmp_path, "plan", "--inputs", "fleet.txt", LITE)
    assert lacking.returncode == 1 and "data does not exist; train needs it (line 11)" in lacking.stderr
    assert tipc(tmp_path, "plan", "fleet.txt", "nonsense").returncode == 2
    assert tipc(tmp_path, "plan", "fleet.txt").returncode == 2


def test_spare_lines_and_weights_reach_the_scripts(tmp_path):
    text = LONG.replace("Global.pretrained_model:null", "Global.pretrained_model:./start")
    text = text.replace("./inference/images\nnull:null", "./inference/images\nGlobal.more:1", 1)
    text = text.replace("configs/rec.yml -o\nnull:null", "configs/rec.yml -o\nGlobal.evaluated:2", 1)
    text = text.replace("--save_log_path:null", "--save_log_path:./logs").replace(
        "True\nnull:null\n", "True\n--spare:3\n"
    )
    text = text.replace("--image_dir:./inference/images", "--image_dir:./others")
    done = made(tmp_path, text)
    train, evaluation, infer = (only(done, stage)[0].argv for stage in ("train", "eval", "infer"))
    assert "Global.pretrained_model=./start" in train and "Global.more=1" in train
    assert evaluation[-1] == "Global.evaluated=2" and infer[-1] == "--spare=3" and "--save_log_path=./logs" in infer
    assert "--image_dir=./inference/images" in infer
    assert "--image_dir=./others" in only(made(tmp_path, text, "whole_infer"), "infer")[0].argv


def test_evaluation(tmp_path):
    given = edited(SHORT, ("eval:eval.py", "eval:eval.py --data-path=./other --use-gpu=False"))
    assert made(tmp_path, given).commands[1].argv[2:4] == ("--data-path=./other", "--use-gpu=False")
    assert len(made(tmp_path, given).commands[1].argv) == 5
    no_key = edited(SHORT, ("--pretrained:null", "null:null")).replace("--pretrained:\n", "--weights:\n")
    assert made(tmp_path, no_key).commands[1].argv[2].startswith("--weights=")
    assert dict(made(tmp_path, SHORT).commands[1].env) == {"CUDA_VISIBLE_DEVICES": "0"}


def test_trainers_of_the_long_form(tmp_path):
    spare = edited(
        LONG,
        ("trainer:norm_train", "trainer:spare_train|to_static_train"),
        (
            "distill_train:null\nnull:null\nnull:null",
            "distill_train:null\nspare_train:s.py\nto_static_train:-o Static=True",
        ),
        ("export1:null", "export1:e.py"),
    )
    done = made(tmp_path, spare, trainers=("spare_train", "to_static_train"))
    assert only(done, "train")[0].argv[1] == "s.py" and only(done, "export")[0].argv[1] == "e.py"
    static = only(done, "train")[1].argv
    assert static[1] == "tools/train.py" and static[5:8] == ("Global.print_batch_step=1", "-o", "Static=True")
    assert only(done, "export")[1].argv[1] == "tools/export_model.py"
    twice = edited(LONG, ("trainer:norm_train", "trainer:normal_train|norm_train"))
    assert stages(made(tmp_path, twice))["train"] == 2


def test_quantised_models(tmp_path):
    text = LONG.replace("--precision:fp32", "--precision:fp32|int8").replace("infer_quant:Fasle", "infer_quant:True")
    shown = [c.id for c in only(made(tmp_path, text, "whole_infer"), "infer")]
    assert len([name for name in shown if "cpu" in name]) == 8 and all(
        "int8" in name for name in shown if "cpu" in name
    )
    assert [name for name in shown if "usetrt_False" in name and "int8" in name] == []


def test_inference_of_what_training_wrote_itself(tmp_path):
    done = made(tmp_path, edited(SHORT, ("norm_export:export.py", "norm_export:null")))
    assert stages(done) == {"train": 2, "eval": 2, "infer": 8}
    assert only(done, "infer")[0].needs == ("norm_train_gpus_0_nodes_1.train",)


def test_whole_infer_of_several_models(tmp_path):
    changes = [
        ("infer_model:./inference/rec/", "infer_model:./a/|./b/"),
        ("infer_export:null", "infer_export:null|True"),
    ]
    done = made(tmp_path, edited(LONG, *changes), "whole_infer")
    assert stages(done) == {"export": 1, "infer": 24}
    (export,) = only(done, "export")
    assert export.argv[1] == "tools/export_model.py" and "Global.checkpoints=./b/" in export.argv and export.makes
    assert only(done, "infer")[0].reads == ("./inference/images", "./a/")
    assert "--rec_model_dir=./test_tipc/output/rec/whole_infer/whole_infer_2/Student" in only(done, "infer")[-1].argv
    with pytest.raises(ConfigError, match="line 30 .* null"):
        no_export = edited(
            LONG, *changes, ("norm_export:tools/export_model.py -c configs/rec.yml -o", "norm_export:null")
        )
        made(tmp_path, no_export, "whole_infer")


def test_devices(tmp_path):
    cpu = edited(SHORT, ("gpu_list:0|0,1", "gpu_list:-1"))
    train = made(tmp_path, cpu).commands[0]
    assert train.env == () and train.argv[-1] == "--use-gpu=False" and train.note == "gpu_list is -1: runs on the CPU"
    pair = made(tmp_path, edited(SHORT, ("gpu_list:0|0,1", "gpu_list:a,b;-1"))).commands[0]
    assert pair.argv[3:5] == ("--ips=a,b", "--nproc_per_node=1")
    assert made(tmp_path, cpu, cards=False, why="--device cpu").commands[0].note == "--device cpu: runs on the CPU"
    gpu = edited(SHORT, ("use-gpu:True", "--use_gpu:gpu"), ("norm_train:train.py", "norm_train:train.py --shape 3 3"))
    argv = made(tmp_path, gpu, cards=False).commands[0].argv
    assert argv[-1] == "--use_gpu=cpu" and argv[2:5] == ("--shape", "3", "3")


def test_benchmark_figures_are_the_first_nodes(tmp_path):
    text = edited(SHORT, FLEET) + "=====train_benchmark_params=====\nbatch_size:16\nfp_items:fp32\nepoch:1\n"
    shows = [made(tmp_path, text, "benchmark_train", address=f"192.168.0.{n}").commands[0].shows for n in (1, 2)]
    assert shows == ["ips", ""]


def test_limits_and_nothing_to_do(tmp_path):
    assert made(tmp_path, SHORT).commands[0].limit == 3600
    assert made(tmp_path, SHORT, "whole_train_whole_infer").commands[0].limit == 30 * 24 * 3600
    assert made(tmp_path, SHORT, limit=5).commands[0].limit == 5
    nothing = edited(SHORT, ("inference:infer.py", "inference:null"), ("infer_export:export.py", "infer_export:null"))
    with pytest.raises(ConfigError, match="nothing to do in whole_infer"):
        made(tmp_path, nothing, "whole_infer")
    with pytest.raises(ConfigError, match="line 32 .* must be True or False, got 'Ture'"):
        made(tmp_path, edited(SHORT, ("--benchmark:True", "--benchmark:Ture")))


def test_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = [
        ("--pretrained:null", "--pretrained:https://host/w.pdparams"),
        ("--data-path:./data", '--data-path:"./my data"'),
    ]
    for name in ("train.py", "eval.py", "export.py", "infer.py", "images.tar"):
        (tmp_path / name).write_text("")
    (tmp_path / "my data").mkdir()
    done = made(tmp_path, edited(SHORT, *changes))
    assert plan.missing(done) == ["./images does not exist; infer needs it (line 31)"]
    (tmp_path / "images").mkdir()
    assert plan.missing(done) == []
    whole = made(tmp_path, edited(SHORT, ("train_model:./weights.pdparams", "train_model:./weights")), "whole_infer")
    assert plan.missing(whole) == ["./weights does not exist; export needs it (line 24)"]
    (tmp_path / "weights.pdparams").write_text("")
    assert plan.missing(whole) == []
