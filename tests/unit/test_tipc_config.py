"""TIPC text files: both forms, addresses, modes, and what `lint` says about wrong ones."""

import json

import pytest

from ppfleet.errors import ConfigError
from ppfleet.tipc import config, lint
from ppfleet.tipc.reader import ConfigLine
from tests.tipc_files import LONG, SHORT, edited, tipc


def parsed(tmp_path, text):
    path = tmp_path / "file.txt"
    path.write_bytes(text.encode())
    return config.parse(path)


def found(tmp_path, text, mode=""):
    path = tmp_path / "file.txt"
    path.write_bytes(text.encode())
    return lint.lint(path, mode)


def test_forms_are_told_by_the_place_of_the_trainer(tmp_path):
    short, long = parsed(tmp_path, SHORT), parsed(tmp_path, LONG)
    assert (short.form, short.model, short.value("image_dir")) == ("short", "toy", "./images")
    assert (long.form, long.model, long.value("train_infer_img_dir")) == ("long", "rec", "./inference/images")
    assert long.lines["inference_dir"].value == "Student"


def test_the_first_colon_splits(tmp_path):
    text = edited(LONG, ("inference_dir:Student", "pretrained_model_url:https://host:81/a.pdparams"))
    line = parsed(tmp_path, text).lines["inference_dir"]
    assert (line.key, line.value) == ("pretrained_model_url", "https://host:81/a.pdparams")


def test_blank_lines_do_not_count_and_errors_name_the_editors_line(tmp_path):
    text = SHORT.replace("gpu_list:0|0,1\n", "\n\ngpu_list:zero\n")
    with pytest.raises(ConfigError, match=r"file.txt: line 6 \('gpu_list:zero'\)"):
        parsed(tmp_path, text)


def test_no_final_newline_trailing_blanks_and_tails(tmp_path):
    tail = "=====train_benchmark_params=====\nbatch_size:16|32\nfp_items:fp32\nepoch:1\n##\nother:1"
    made = parsed(tmp_path, LONG.replace("\n", "  \n") + tail)
    assert made.tails["train_benchmark_params"]["batch_size"].values() == ["16", "32"]
    assert made.lines["infer_spare"].key == "null"


def test_a_short_file_may_end_before_the_benchmark(tmp_path):
    assert parsed(tmp_path, SHORT.replace("--benchmark:True\n", "")).value("benchmark") == ""


@pytest.mark.parametrize(
    ("text", "nodes", "devices"),
    [
        ("-1", (), ()),
        ("0", (), ("0",)),
        ("0,1", (), ("0", "1")),
        ("0,1,2,3,4,5,6,7,8", (), tuple("012345678")),
        ("192.168.0.1;0,1", ("192.168.0.1",), ("0", "1")),
        ("node1,node2;0,1", ("node1", "node2"), ("0", "1")),
        ("1.1.1.1,1.1.1.2;0,1", ("1.1.1.1", "1.1.1.2"), ("0", "1")),
        ("10.0.0.1,10.0.0.2;0", ("10.0.0.1", "10.0.0.2"), ("0",)),
        ("fe80::1,fe80::2;0,1", ("fe80::1", "fe80::2"), ("0", "1")),
        ("[2001:db8::1],[2001:db8::2];0", ("[2001:db8::1]", "[2001:db8::2]"), ("0",)),
        ("10.0.0.1,10.0.0.2;-1", ("10.0.0.1", "10.0.0.2"), ()),
    ],
)
def test_addresses_and_devices(text, nodes, devices):
    fleet = config.parse_devices(ConfigLine(4, 4, f"gpu_list:{text}"), text)
    assert (fleet.nodes, fleet.devices) == (nodes, devices)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "null",
        "00,0",
        "\u0663",
        "256.1.1.1,9;0",
        "1.1.1.1:80,2;0",
        "a b;0",
        "0;1;2",
        "0,0",
        "10.0.0.1",
        "10.0.0.1,10.0.0.1;0",
        "10.0.0.1, 10.0.0.2;0",
        ";0",
        "10.0.0.1,;0",
        "1;",
        "-2",
    ],
)
def test_no_addresses_and_devices(text):
    with pytest.raises(ConfigError, match="line 4"):
        config.parse_devices(ConfigLine(4, 4, f"gpu_list:{text}"), text)


def test_values_by_mode(tmp_path):
    made = parsed(tmp_path, SHORT)
    assert made.value("epochs", "lite_train_lite_infer") == "5"
    assert made.value("pretrained", "whole_infer") == ""
    with pytest.raises(ConfigError, match="line 6 .* no value for whole_infer, only for lite_train_lite_infer"):
        made.value("epochs", "whole_infer")


@pytest.mark.parametrize(
    "banner", ["ptq_params", "serving_params", "cpp_infer_params", "paddle2onnx_params", "odd_params"]
)
def test_other_families_are_named(tmp_path, banner):
    text = edited(SHORT, (SHORT.split("\n")[0], f"====={banner}====="))
    with pytest.raises(ConfigError, match=f"of the {banner.removesuffix('_params')} family"):
        parsed(tmp_path, text)


# What lint says


@pytest.mark.parametrize("text", [SHORT, LONG.replace("Fasle", "False")])
def test_a_good_file_has_no_findings(tmp_path, text):
    assert found(tmp_path, text) == []


@pytest.mark.parametrize(
    ("form", "changes", "level", "line", "words"),
    [
        (LONG, [], "warning", 39, ["'Fasle'", "misspelt False"]),
        (SHORT, [("trainer:norm_train", "trainer:normal_train"), ("norm_train:train.py", "normal_train:train.py")],
         "warning", 13, ["normal_train", "norm_train"]),
        (SHORT, [("gpu_list:0|0,1", "gpu_list:192.168.0.1, 192.168.0.2;0,1")], "error", 4,
         ["contains a space", "write 192.168.0.1,192.168.0.2;0,1"]),
        (SHORT, [("gpu_list:0|0,1", "gpu_list:192.168.0.1,192.168.0.2")], "error", 4, ["without devices", ";0,1"]),
        (SHORT, [("--pretrained:null", "")], "error", 12, ["1 line is missing", "short form", "expected pretrained"]),
        (LONG, [("Global.auto_cast:null", "")], "error", 14, ["1 line is missing", "long form"]),
        (SHORT, [("--pretrained:null", "--pretrained:null\n--more:1")], "error", 14, ["1 line is too many"]),
        (SHORT, [("eval:eval.py", "")], "error", 17, ["expected `eval:`"]),
        (SHORT, [("norm_export:export.py", "")], "error", 22, ["'##'", "expected norm_export", "1 line is missing"]),
        (LONG, [("quant_export:null", "")], "error", 31, ["expected pact_export", "1 line is missing"]),
        (SHORT, [("--epochs:lite_train_lite_infer=5|whole_train_whole_infer=90", "--epochs:lite_train_lite_infr=5")],
         "error", 6, ["unknown mode 'lite_train_lite_infr'", "did you mean lite_train_lite_infer?"]),
        (SHORT, [("trainer:norm_train", "trainer:pact_train"), ("norm_train:train.py", "pact_train:train.py")],
         "warning", 13, ["pact_train", "--trainers"]),
        (SHORT, [("trainer:norm_train", "trainer:amp_train")], "error", 13, ["amp_train", "line 14", "norm_train"]),
        (SHORT, [("norm_train:train.py", "norm_train:null")], "error", 14, ["null"]),
        (SHORT, [("--output-dir:./output/", "--pretrained:null"), 
         ("--pretrained:null\ntrain_model_name:latest.pdparams",
         "--output-dir:./output/\ntrain_model_name:latest.pdparams")], "error", 7, ["expected output_dir"]),
        (SHORT, [("norm_train:train.py", "norm_train:train.py --a='b")], "error", 14, ["quotation"]),
        (SHORT, [("--use-gpu:True|False", "--use-gpu:perhaps")], "error", 28, ["perhaps"]),
        (SHORT, [("norm_export:export.py", "norm_export export.py")], "error", 22, ["no colon"]),
        (SHORT, [("model_name:toy", "model_name:null")], "error", 2, ["must name the model"]),
        (SHORT, [("train_model_name:latest.pdparams", "train_model_nam:latest")], "error", 10, ["train_model_name"]),
        (SHORT, [("trainer:norm_train", "trainer\uff1anorm_train")], "error", 0, ["no line `trainer:`"]),
        (SHORT, [("norm_export:export.py", "norm_export\uff1aexport.py")], "error", 22, ["full-width"]),
        (SHORT, [("gpu_list:0|0,1", "gpu_list:0\uff0c1")], "error", 4, ["full-width"]),
        (SHORT, [("--epochs:lite_train_lite_infer=5|whole_train_whole_infer=90", "--epochs:")], "warning", 6,
         ["no value"]),
        (SHORT, [("trainer:norm_train", "trainer:../../evil")], "error", 13, ["must name a trainer"]),
    ],
)  # fmt: skip
def test_findings(tmp_path, form, changes, level, line, words):
    findings = found(tmp_path, edited(form, *changes))
    matching = [f for f in findings if f.level == level and f.line == line and all(word in f.text for word in words)]
    assert matching, findings


@pytest.mark.parametrize("form", [SHORT, LONG.replace("Fasle", "False")])
def test_a_line_that_is_missing_twice_or_in_the_wrong_place_is_found(tmp_path, form):
    lines = form.rstrip("\n").split("\n")
    end = next(number for number, line in enumerate(lines) if line.startswith("--benchmark"))
    silent = []
    for number in range(end):
        changed = {
            "missing": lines[:number] + lines[number + 1 :],
            "twice": lines[: number + 1] + lines[number:],
            "swapped": [*lines[:number], lines[number + 1], lines[number], *lines[number + 2 :]],
        }
        for what, text in changed.items():
            if text != lines and not any(f.level == "error" for f in found(tmp_path, "\n".join(text))):
                silent.append((what, lines[number].partition(":")[0]))
    # Trainers are found by their names, and spare lines may be called anything: their order is of no consequence.
    harmless = [("swapped", name) for name in ("norm_train", "pact_train", "fpgm_train", "distill_train", "export1")]
    assert [each for each in silent if each not in harmless] == []


def test_control_characters_and_odd_line_ends(tmp_path):
    with pytest.raises(ConfigError, match="line 2 contains a control character"):
        parsed(tmp_path, SHORT.replace("toy", "t\x01y"))
    assert parsed(tmp_path, SHORT.replace("./data", "./da\u2028ta")).lines["trainer"].source == 13
    assert parsed(tmp_path, SHORT.replace("\n", "\r")).form == "short"
    with pytest.raises(ConfigError, match="must begin with"):
        parsed(tmp_path, "=" * 5000 + "x\n" + SHORT)


def test_nodes(tmp_path):
    def nodes(text):
        return parsed(tmp_path, edited(SHORT, ("gpu_list:0|0,1", f"gpu_list:{text}"))).nodes()

    assert nodes("0|a;0,1|a,b;0|a,c;0") == ("a", "b", "c") and nodes("0") == ()
    with pytest.raises(ConfigError, match="line 4 .* must begin with the same node"):
        nodes("a,b;0|c,d;0")


def test_null_as_a_key(tmp_path):
    text = edited(SHORT, ("eval:eval.py", "null:null"), ("inference:infer.py", "null:null"))
    assert found(tmp_path, text) == [] and parsed(tmp_path, text).value("eval") == ""


def test_a_byte_order_mark(tmp_path):
    assert parsed(tmp_path, "\ufeff" + SHORT).form == "short"
    assert [f.text for f in found(tmp_path, "\ufeff" + SHORT)] == [
        "a byte order mark before the first `=`: save the file as UTF-8 without BOM"
    ]


@pytest.mark.parametrize("name", ["a/b", "a b", "..", ""])
def test_a_model_is_a_directorys_name(tmp_path, name):
    with pytest.raises(ConfigError, match="line 2 .* must name the model"):
        parsed(tmp_path, edited(SHORT, ("model_name:toy", f"model_name:{name}")))


def test_a_trainer_that_is_nearly_known(tmp_path):
    text = SHORT.replace("norm_train", "nrom_train")
    assert any("did you mean norm_train?" in f.text for f in found(tmp_path, text))


def test_blanks_between_addresses(tmp_path):
    for written in ("10.0.0.1 10.0.0.2;0,1", "10.0.0.1, 10.0.0.2;0,1", "10.0.0.1 ,10.0.0.2; 0,1"):
        (finding,) = found(tmp_path, edited(SHORT, ("gpu_list:0|0,1", f"gpu_list:{written}")))
        assert finding.text.endswith("write 10.0.0.1,10.0.0.2;0,1")


def test_windows_line_ends(tmp_path):
    (finding,) = found(tmp_path, SHORT.replace("\n", "\r\n"))
    assert (finding.level, finding.line) == ("warning", 1) and "32 lines end with \\r\\n" in finding.text
    assert parsed(tmp_path, SHORT.replace("\n", "\r\n")).value("train_model_name") == "latest.pdparams"


def test_a_mode_without_a_value(tmp_path):
    (finding,) = found(tmp_path, SHORT, "benchmark_train")
    assert finding.level == "error" and "train_benchmark_params" in finding.text
    (finding,) = found(tmp_path, SHORT, "lite_train_whole_infer")
    assert finding.line == 6 and "no value for lite_train_whole_infer" in finding.text


def test_lint_as_a_command(tmp_path):
    (tmp_path / "good.txt").write_text(SHORT)
    (tmp_path / "bad.txt").write_text(edited(SHORT, ("eval:eval.py", "")))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    assert tipc(tmp_path, "lint", "good.txt").returncode == 0
    bad = tipc(tmp_path, "lint", "bad.txt", "--json")
    assert bad.returncode == 1 and json.loads(bad.stdout)[0]["line"] == 17
    for name, words in (("none.txt", "no such file"), ("binary.txt", "not UTF-8 text"), (".", "directory")):
        done = tipc(tmp_path, "lint", name)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
