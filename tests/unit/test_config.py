"""Settings: where each value comes from, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commlens import commands, config
from commlens.config import (
    ACCEPTED,
    FAULTS,
    Resolved,
    Settings,
    is_switched_on,
    load_settings,
    settings_environment,
    variable_of,
)
from commlens.errors import ConfigError
from commlens.launch import worker
from conftest import SOURCE


def load(environ: dict[str, str] | None = None, **kwargs: Any) -> Resolved:
    return load_settings(environ=environ or {}, **kwargs)


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_without_anything_the_defaults_hold():
    resolved = load()
    assert resolved.settings == Settings()
    assert set(resolved.origins.values()) == {"default"}
    assert resolved.warnings == []


def test_every_default_is_accepted():
    for field in dataclasses.fields(Settings):
        if field.default is not None:
            assert ACCEPTED[field.name].parse(field.default) == field.default


def test_each_layer_wins_over_the_one_below(tmp_path):
    path = yaml_file(
        tmp_path, "stall_timeout: 10\nbox_entries: 100\nkeep_dumps: 3\ndump_dir: from-file\n"
    )
    environ = {
        "COMMLENS_BOX_ENTRIES": "200",
        "COMMLENS_KEEP_DUMPS": "4",
        "TORCH_FR_DUMP_TEMP_FILE": "/logs/fr_",
    }
    resolved = load(environ, config_file=path, overrides={"keep_dumps": 5, "abort_on": None})
    values = resolved.settings
    assert (values.stall_timeout, values.box_entries, values.keep_dumps, values.abort_on) == (
        10.0,
        200,
        5,
        "nothing",
    )
    assert values.dump_dir == "/logs/commlens"
    assert resolved.origins["stall_timeout"] == str(path)
    assert resolved.origins["box_entries"] == "COMMLENS_BOX_ENTRIES"
    assert resolved.origins["keep_dumps"] == "command line"
    assert resolved.origins["dump_dir"] == "TORCH_FR_DUMP_TEMP_FILE"
    assert resolved.origins["abort_on"] == "default"


def test_the_file_is_looked_for_in_three_places(tmp_path):
    usual = tmp_path / "xdg" / "commlens"
    usual.mkdir(parents=True)
    yaml_file(usual, "keep_dumps: 1")
    home = tmp_path / "home" / ".config" / "commlens"
    home.mkdir(parents=True)
    yaml_file(home, "keep_dumps: 2")
    named = yaml_file(tmp_path, "keep_dumps: 3")
    environ = {"HOME": str(tmp_path / "home")}
    assert load(environ).settings.keep_dumps == 2
    environ["XDG_CONFIG_HOME"] = str(tmp_path / "xdg")
    assert load(environ).settings.keep_dumps == 1
    environ["COMMLENS_CONFIG_FILE"] = str(named)
    assert load(environ).settings.keep_dumps == 3
    assert load(environ, config_file=usual / "config.yaml").settings.keep_dumps == 1


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
def test_on(value):
    assert load({"COMMLENS_TIMING": value}).settings.timing is True
    assert is_switched_on({"COMMLENS": value})


@pytest.mark.parametrize("value", ["0", "false", "No", "off"])
def test_off(value):
    assert load({"COMMLENS_DUMP_ON_TIMEOUT": value}).settings.dump_on_timeout is False
    assert not is_switched_on({"COMMLENS": value})


@pytest.mark.parametrize(
    ("value", "expected"),
    [(False, "off"), ("off", "off"), (True, "on"), ("on", "on"), ("/host", "/host")],
)
def test_hardware_is_watched_on_off_or_below_a_folder(value, expected):
    """YAML reads off as false."""
    assert load(overrides={"health": value}).settings.health == expected


def test_a_folder_of_the_hosts_files_is_absolute(tmp_path, monkeypatch):
    """A script may change its working directory."""
    monkeypatch.chdir(tmp_path)
    assert load({"COMMLENS_HEALTH": "host"}).settings.health == str(tmp_path / "host")


@pytest.mark.parametrize(
    ("given", "level"),
    [("off", "off"), (False, "off"), ("calls", "calls"), ("Kernels", "kernels")],
)
def test_how_much_nccl_tells(given: object, level: str):
    assert load(overrides={"nccl_profiler": given}).settings.nccl_profiler == level


def test_nccl_does_not_tell_everything():
    with pytest.raises(ConfigError, match="off, calls, kernels or transfers"):
        load(overrides={"nccl_profiler": "all"})
    assert load({"COMMLENS_NCCL_FOLDER": "/x", "COMMLENS_NCCL_EVENTS": "calls"}).warnings == []


@pytest.mark.parametrize("value", ["0640", "640", 0o640, 640, " 0640"])
def test_permissions_in_every_spelling(tmp_path, value):
    """YAML reads 0640 as an octal number."""
    assert load(overrides={"dump_mode": value}).settings.dump_mode == "0640"


@pytest.mark.parametrize(
    ("value", "faults"),
    [
        ("nothing", []),
        ("stall", ["stall"]),
        (" Stall , diverged", ["stall", "diverged"]),
        ("all", ["stall", "mismatch", "diverged"]),
    ],
)
def test_a_job_is_ended_after_the_faults_that_are_named(value, faults):
    settings = load(overrides={"abort_on": value}).settings
    assert [fault for fault in FAULTS if settings.aborts_on(fault)] == faults


def test_an_empty_variable_is_not_set():
    assert load({"COMMLENS_STALL_TIMEOUT": "", "COMMLENS_BOX_DIR": " "}).settings == Settings()
    assert not is_switched_on({"COMMLENS": " "}) and not is_switched_on({})


@pytest.mark.parametrize(
    ("value", "expected"),
    [(False, "off"), ("Off", "off"), ("auto", "auto"), ("/shared/../meet", "/meet")],
)
def test_worlds_meet_in_a_store_or_below_a_folder(value, expected):
    assert load({} if value is False else {"COMMLENS_MEET": value}).settings.meet == (
        expected if value is not False else "auto"
    )
    assert load(overrides={"meet": value}).settings.meet == expected


BAD = {
    "box_entries": ["-1", "65001", "many", "1.5", True],
    "dump_dir": [3, "a\0b"],
    "keep_dumps": ["0", "x"],
    "dump_mode": ["0700", "0400", "640x", 493, 0o777, "rw", True],
    "dump_on_timeout": ["maybe", 2],
    "stall_timeout": ["0", "-1", "nan", "inf", "1m", True, [1]],
    "abort_on": ["kill", "stall,kill", "stall,nothing", "", True],
    "meet": ["", "a\0b", 3],
    "dump_signal": ["SIGKILL", "STOP", "SIGWHAT"],
    "job": ["..", "a/b", "-rf"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_a_bad_value_is_refused_with_its_place_and_what_is_accepted(name, value):
    with pytest.raises(ConfigError) as caught:
        load(overrides={name: value})
    message = str(caught.value)
    assert name in message and "command line" in message and ACCEPTED[name].words in message
    resolved = load(overrides={name: value}, strict=False)
    assert resolved.settings == Settings() and message in resolved.warnings[0]


def test_a_bad_variable_is_named():
    with pytest.raises(
        ConfigError,
        match=(
            "COMMLENS_STALL_TIMEOUT is 'soon', which is not accepted: it takes auto, or a number of"
            " seconds above 0"
        ),
    ):
        load({"COMMLENS_STALL_TIMEOUT": "soon"})


def test_in_a_worker_a_bad_value_leaves_what_a_lower_layer_said(tmp_path):
    path = yaml_file(tmp_path, "stall_timeout: 10\n")
    resolved = load({"COMMLENS_STALL_TIMEOUT": "soon"}, config_file=path, strict=False)
    assert resolved.settings.stall_timeout == 10.0
    assert resolved.origins["stall_timeout"] == str(path)
    assert len(resolved.warnings) == 1


def test_an_unknown_variable_is_refused_with_a_suggestion():
    with pytest.raises(
        ConfigError, match="COMMLENS_STALL_TIMOUT.*Did you mean COMMLENS_STALL_TIMEOUT"
    ):
        load({"COMMLENS_STALL_TIMOUT": "5"})
    assert "COMMLENS_STALL_TIMOUT" in load({"COMMLENS_STALL_TIMOUT": "5"}, strict=False).warnings[0]


def test_an_unknown_key_is_refused_with_its_file(tmp_path):
    path = yaml_file(tmp_path, "colour: red\n")
    with pytest.raises(ConfigError) as caught:
        load(config_file=path)
    assert (
        "'colour'" in str(caught.value)
        and str(path) in str(caught.value)
        and "stall_timeout" in str(caught.value)
    )


@pytest.mark.parametrize(
    "text",
    ["- a\n- b\n", "just words", "a: [1\n", "stall_timeout: !!python/object:os.system x\n", "\x00"],
)
def test_a_file_that_is_no_settings_file_is_refused_and_named(tmp_path, text):
    path = yaml_file(tmp_path, text)
    with pytest.raises(ConfigError, match="config.yaml"):
        load(config_file=path)
    resolved = load(config_file=path, strict=False)
    assert resolved.settings == Settings() and str(path) in resolved.warnings[0]


@pytest.mark.parametrize("text", ["", "# nothing\n", "stall_timeout:\n"])
def test_a_file_may_say_nothing(tmp_path, text):
    assert load(config_file=yaml_file(tmp_path, text)).settings == Settings()


def test_a_named_file_must_exist_and_the_usual_one_need_not(tmp_path):
    missing = str(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match="no.yaml.*cannot be read: No such file"):
        load(config_file=missing)
    with pytest.raises(ConfigError, match="COMMLENS_CONFIG_FILE"):
        load({"COMMLENS_CONFIG_FILE": missing})
    assert (
        "COMMLENS_CONFIG_FILE" in load({"COMMLENS_CONFIG_FILE": missing}, strict=False).warnings[0]
    )
    assert load({"XDG_CONFIG_HOME": str(tmp_path)}).warnings == []
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="pipe.yaml.*it is not a regular file"):
        load(config_file=str(tmp_path / "pipe.yaml"))
    assert load(config_file=os.devnull).warnings == []
    with pytest.raises(ConfigError, match="Is a directory"):
        load(config_file=tmp_path)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(config_file=path)


class TestTorchsOwnVariables:
    @pytest.mark.parametrize("variable", ["TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"])
    def test_the_size_is_taken_over(self, variable):
        resolved = load({variable: "5000"})
        assert resolved.settings.box_entries == 5000 and resolved.origins["box_entries"] == variable

    @pytest.mark.parametrize(
        ("variable", "ours"),
        [
            ("TORCH_FR_BUFFER_SIZE", "box_entries"),
            ("TORCH_NCCL_TRACE_BUFFER_SIZE", "box_entries"),
            ("TORCH_NCCL_DUMP_ON_TIMEOUT", "dump_on_timeout"),
        ],
    )
    def test_a_zero_does_not_switch_off_ours_and_says_what_would(self, variable, ours):
        resolved = load({variable: "0"})
        assert resolved.settings == Settings() and resolved.origins[ours] == "default"
        assert variable in resolved.warnings[0] and f"{variable_of(ours)}=0" in resolved.warnings[0]
        assert load({variable: "0", variable_of(ours): "0"}).warnings == []

    def test_a_size_beyond_ours_is_cut(self):
        resolved = load({"TORCH_FR_BUFFER_SIZE": "1000000"})
        assert resolved.settings.box_entries == 65_000 and "65000" in resolved.warnings[0]

    def test_ours_win_and_the_present_name_wins_over_the_former(self):
        both = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "10", "TORCH_FR_BUFFER_SIZE": "20"}
        assert load(both).settings.box_entries == 20
        assert load({**both, "COMMLENS_BOX_ENTRIES": "30"}).settings.box_entries == 30

    @pytest.mark.parametrize("variable", ["TORCH_NCCL_TRACE_CPP_STACK", "TORCH_FR_CPP_STACK"])
    def test_cpp_stacks(self, variable):
        assert load({variable: "1"}).settings.cpp_stack is True
        assert load({variable: "0"}).settings.cpp_stack is False

    def test_timing(self):
        assert load({"TORCH_NCCL_ENABLE_TIMING": "true"}).settings.timing is True

    @pytest.mark.parametrize(
        ("value", "folder"),
        [
            ("/tmp/nccl_trace_rank_", "/tmp/commlens"),
            ("/logs/", "/logs/commlens"),
            ("fr", "commlens"),
            ("/a/commlens", "/a/commlens"),
        ],
    )
    def test_dumps_go_beside_torchs_file_and_never_onto_it(self, value, folder):
        resolved = load({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": value})
        assert resolved.settings.dump_dir == folder
        assert all(f"{value}{rank}" != folder for rank in range(16))

    def test_the_pipes_prefix_is_shared(self):
        assert (
            load({"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/tmp/pipe_"}).settings.dump_pipe
            == "/tmp/pipe_"
        )

    @pytest.mark.parametrize("strict", [True, False])
    def test_a_bad_value_is_torchs_to_refuse(self, strict):
        environ = {"TORCH_FR_BUFFER_SIZE": "lots", "TORCH_NCCL_ENABLE_TIMING": "perhaps"}
        resolved = load(environ, strict=strict)
        assert resolved.settings == Settings() and len(resolved.warnings) == 2


@pytest.mark.parametrize("value", ["1", "y", "Yes", "t", "TRUE", "on"])
def test_accelerates_debug_mode_switches_verification_on(value):
    resolved = load({"ACCELERATE_DEBUG_MODE": value})
    assert resolved.settings == Settings(debug=True)
    assert resolved.origins["debug"] == "ACCELERATE_DEBUG_MODE"


@pytest.mark.parametrize("value", ["0", "false", "", "perhaps"])
def test_accelerates_debug_mode_switches_nothing_off(value, tmp_path):
    path = yaml_file(tmp_path, "debug: true\n")
    resolved = load({"ACCELERATE_DEBUG_MODE": value}, config_file=path)
    assert resolved.settings.debug is True and resolved.warnings == []


def test_accelerates_debug_mode_is_above_the_file_and_below_what_is_ours(tmp_path):
    path = yaml_file(tmp_path, "debug: false\n")
    environ = {"ACCELERATE_DEBUG_MODE": "1"}
    assert load(environ, config_file=path).settings.debug is True
    assert load({**environ, "COMMLENS_DEBUG_MODE": "0"}).settings.debug is False
    assert load(environ, overrides={"debug": False}).settings.debug is False


@pytest.mark.parametrize(
    ("given", "debug"),
    [([], True), (["--debug"], True), (["--no-debug"], False), (["--debug=sample"], "sample")],
)
def test_no_debug_wins_over_the_environment_and_the_file(given, debug, tmp_path, monkeypatch):
    import argparse

    from commlens.launch.options import add_settings, settings_from

    monkeypatch.setenv("COMMLENS_DEBUG_MODE", "1")
    parser = argparse.ArgumentParser()
    add_settings(parser)
    path = yaml_file(tmp_path, "debug: true\n")
    resolved = settings_from(parser.parse_args([*given, "--config-file", str(path)]))
    assert resolved.settings.debug is debug
    assert resolved.origins["debug"] == ("command line" if given else "COMMLENS_DEBUG_MODE")


@pytest.mark.parametrize(
    ("given", "checks"),
    [
        (["train.py"], None),
        (["--check-numbers", "train.py"], "every 100 steps"),
        (["--check-numbers=every 20 steps,nan", "train.py"], "every 20 steps,nan"),
        (["--check-numbers", "--check-numbers=7", "train.py"], "every 7 steps"),
        (["train.py", "--check-numbers=7"], None),
    ],
)
def test_check_numbers_takes_a_value_after_an_equals_sign_only(given, checks):
    import argparse

    from commlens.launch.options import add_settings, settings_from

    parser = argparse.ArgumentParser()
    add_settings(parser)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parsed = parser.parse_args(given)
    assert parsed.program == "train.py"
    assert settings_from(parsed).settings.check_numbers == checks


@pytest.mark.parametrize(
    ("given", "program", "steps"),
    [
        (["train.py", "--trace"], ["train.py", "--trace"], None),
        (["train.py", "--trace=2:4"], ["train.py", "--trace=2:4"], None),
        (["--trace", "train.py", "2:4"], ["train.py", "2:4"], "all"),
        (["--trace=2:4", "train.py", "--trace", "all"], ["train.py", "--trace", "all"], "2:4"),
        (["--trace", "-m", "all"], ["all"], "all"),
    ],
)
def test_trace_takes_a_value_after_an_equals_sign_only(given, program, steps):
    from commlens.launch.torchrun import parse

    parsed = parse(given)
    assert [parsed.training_script, *parsed.training_script_args] == program
    assert parsed.commlens_trace == steps


@pytest.mark.parametrize("value", ["sample", " Sample"])
def test_debug_takes_sample_from_the_environment_and_passes_it_on(value):
    from commlens.config import settings_environment

    settings = load({"COMMLENS_DEBUG_MODE": value}).settings
    assert settings.debug == "sample"
    assert settings_environment(settings)["COMMLENS_DEBUG_MODE"] == "sample"


def test_a_worker_that_accelerate_started_alone_is_told():
    from commlens.launch.recording import lone_worker

    alone = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}
    assert "commlens launch --nproc-per-node N" in (lone_worker(alone) or "")
    assert lone_worker({**alone, "LOCAL_RANK": "0"}) is None
    assert lone_worker({"MASTER_PORT": "29500"}) is None


def test_a_launcher_hands_its_settings_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    handed = Settings(
        box_dir="boxes",
        box_entries=7,
        dump_dir="here",
        keep_dumps=2,
        dump_mode="0644",
        dump_on_timeout=False,
        stall_timeout=1.5,
        abort_on="stall",
        cpp_stack=True,
        timing=True,
        dump_signal="SIGUSR2",
        dump_pipe="pipes/",
        trace="2:4",
        trace_dir="traces",
        job="job-1",
        watched=True,
    )
    received = load(settings_environment(handed)).settings
    absolute = {
        "box_dir": str(tmp_path / "boxes"),
        "dump_dir": str(tmp_path / "here"),
        "dump_pipe": f"{tmp_path}/pipes/",
    }
    absolute["trace_dir"] = str(tmp_path / "traces")
    assert received == dataclasses.replace(handed, **absolute)


def test_what_is_handed_on_wins_over_a_workers_own_file_and_torchs_variables(tmp_path):
    path = yaml_file(tmp_path, "stall_timeout: 10\nbox_entries: 3\n")
    environ = {
        **settings_environment(Settings()),
        "TORCH_FR_BUFFER_SIZE": "9",
        "COMMLENS_CONFIG_FILE": str(path),
    }
    received = load(environ).settings
    assert (received.stall_timeout, received.box_entries) == ("auto", 2000)


@pytest.mark.parametrize(
    ("option", "passed"), [("--check-numbers", "on"), ("--check-numbers=off", "off")]
)
def test_run_passes_on_which_numbers_to_check(option, passed, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(worker, "run", lambda *_, environment, **__: given.append(environment))
    (tmp_path / "train.py").touch()
    commands.main(["run", option, str(tmp_path / "train.py")])
    assert load(given[0]).settings == load({"COMMLENS_CHECK_NUMBERS": passed}).settings
    assert given[0].keys() == {"COMMLENS_CHECK_NUMBERS"}


def test_what_the_launcher_was_told_to_leave_off_stays_off_in_its_workers(tmp_path):
    path = yaml_file(tmp_path, "check_numbers: on\n")
    off = load({}, config_file=path, overrides={"check_numbers": "off"}).settings
    for environ in ({"COMMLENS_CHECK_NUMBERS": "nan"}, {"COMMLENS_CONFIG_FILE": str(path)}):
        assert load(environ).settings.check_numbers is not None
        assert load({**environ, **settings_environment(off)}).settings.check_numbers is None


def test_a_stall_timeout_is_learned_unless_it_is_a_number(tmp_path):
    assert load({}).settings.stall_timeout == "auto"
    assert load({}).settings.stall_ceiling_s == 60.0
    path = yaml_file(tmp_path, "stall_timeout: 120\n")
    numbers = load({}, config_file=path), load({"COMMLENS_STALL_TIMEOUT": "9"})
    assert [each.settings.stall_timeout for each in numbers] == [120.0, 9.0]
    assert [each.settings.stall_ceiling_s for each in numbers] == [120.0, 9.0]
    again = load({"COMMLENS_STALL_TIMEOUT": " Auto "}, config_file=path)
    assert again.settings.stall_timeout == "auto"


@pytest.mark.launches
def test_without_a_file_only_the_standard_library_is_imported():
    program = (
        "import sys; before = set(sys.modules); from commlens.config import load_settings;"
        " load_settings(environ={});new = {name.split('.')[0] for name in set(sys.modules) -"
        " before};sys.exit(str(new - set(sys.stdlib_module_names) - {'commlens'}) if new -"
        " set(sys.stdlib_module_names) - {'commlens'} else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(SOURCE)!r}); {program}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_one_setting_is_checked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLENS_STALL_TIMEOUT", "soon")
    assert config.accepted("world", "trainer", "argument of commlens.world") == "trainer"
    with pytest.raises(ConfigError, match=r"world \(argument of commlens.world\) is 'a b'"):
        config.accepted("world", "a b", "argument of commlens.world")
