"""The test of a module lies at the module's path: ``src/commlens/watch/stall.py`` is tested by
``tests/unit/watch/test_stall.py``, or by files whose names begin so, such as
``test_stall_certain.py``.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

from conftest import SOURCE

UNIT = Path(__file__).parent
PACKAGE = SOURCE / "commlens"

NOT_YET = {
    "integration/test_accelerate.py": """
        verification/accelerate
    """,
    "integration/test_background_build.py": """
        launch/background_build
    """,
    "integration/test_call_site.py": """
        verification/call_site
    """,
    "integration/test_capture.py": """
        capture/completion  
        capture/init_hooks capture/rank_environment capture/recorder
        capture/session capture/thread_id 
         tap/tap tap/token
    """,
    "integration/test_check.py": """
        check/objects check/recorder check/run_rank commands/check
    """,
    "integration/test_comm_debug_mode.py": """
        tracing/comm_debug/mode tracing/comm_debug/modules tracing/comm_debug/output
        
    """,
    "integration/test_launch.py": """
        commands/launch launch/torchrun launch/worker
    """,
    "integration/test_numbers.py": """
        model/numbers numbers/differences numbers/inspection
        numbers/job_folder 
    """,
    "integration/test_native_records.py": """
        capture/native_recorder tap/interned_args
    """,
    "integration/test_nccl_like_recorded.py": """
        tap/cuda_graphs
    """,
    "integration/test_preview.py": """
        reports/trace_short
        tracing/preview/cuda tracing/preview/objects tracing/preview/preview tracing/preview/store
    """,
    "integration/test_pytest_plugin.py": """
        testing testing/observation testing/observer_client testing/plugin
        testing/rank_process
    """,
    "integration/test_scenarios.py": """
        scenarios/lab
    """,
    "integration/test_trace_attribution.py": """
        tracing/attribution/op_names tracing/attribution/owners
         tracing/attribution/pipelines
        tracing/attribution/recomputations tracing/attribution/stacks
        tracing/fake_tensors tracing/ops tracing/raw_event
        tracing/session tracing/trace_events tracing/tracer
    """,
    "integration/test_trace_command.py": """
        launch/trace_worker tracing/api tracing/script
    """,
    "integration/test_verify_strict.py": """
        verification/announcer verification/comparison
        verification/rendezvous
    """,
    "integration/test_verify_switches.py": """
        commands/run
    """,
    "unit/diagnosis/select/test_worlds.py": """
        model/worlds
    """,
    "integration/test_watch.py": """
        commands/dump commands/status
    """,
    "unit/blackbox/test_packed.py": """
        blackbox/copy blackbox/header
    """,
    "unit/blackbox/test_reader.py": """
        blackbox/rank_log
    """,
    "unit/blackbox/test_reader_damaged.py": """
        blackbox/layout
    """,
    "unit/boards/test_board_native.py": """
        boards/refusal_log
    """,
    "unit/capture/test_device_queues.py": """
        capture/torch_progress
    """,
    "unit/capture/test_job_box.py": """
        dumps/folder
    """,
    "unit/commands/test_trace.py": """
        traces/files
    """,
    "unit/diagnosis/causes/test_missing.py": """
        diagnosis/align/alignment diagnosis/causes/context diagnosis/causes/find_all
        model/cause model/collective
    """,
    "unit/diagnosis/test_api_library.py": """
        model/verdict_html
    """,
    "unit/diagnosis/views/test_entries.py": """
        model/entries reports/entries_terminal
    """,
    "unit/diagnosis/words/test_describe.py": """
        diagnosis/words/*
    """,
    "unit/dumps/sources/test_walk.py": """
        dumps/sources/source
    """,
    "unit/dumps/test_parallel.py": """
        dumps/discover
    """,
    "unit/formats/flight_recorder/test_reader_native_entries.py": """
        formats/flight_recorder/entries formats/flight_recorder/table
        formats/flight_recorder/to_columns
    """,
    "unit/formats/flight_recorder/test_reader.py": """
        diagnosis/index/columns
    """,
    "unit/formats/test_torch_log.py": """
        formats/columns formats/torch_log/lines formats/torch_log/log_columns formats/torch_log/log_parser
        formats/torch_log/rank_lines formats/torch_log/tracebacks
    """,
    "unit/formats/test_trace_json.py": """
        model/trace model/trace_changes model/trace_summary
    """,
    "unit/launch/test_new_warnings.py": """
        launch/environment
    """,
    "unit/matching/test_collectives.py": """
        matching/answer
    """,
    "unit/native/test_build.py": """
        native/cache
    """,
    "unit/outside/test_verdict.py": """
        outside/sample
    """,
    "unit/processes/test_senders.py": """
        model/sender
    """,
    "unit/reports/test_terminal.py": """
        model/verdict reports/console
    """,
    "unit/reports/test_trace_page.py": """
        commands/view
    """,
    "unit/reports/test_verdict_page.py": """
        reports/verdict_page/data reports/verdict_page/job reports/verdict_page/rank_grids
        reports/verdict_page/stacks reports/verdict_page/tables
    """,
    "unit/speed/test_step_times.py": """
        reports/step_table
    """,
    "unit/test_config.py": """
        launch/options launch/recording
    """,
    "unit/traces/test_diff.py": """
        commands/compare traces/diff_ranks traces/page
    """,
    "unit/traces/test_times.py": """
        formats/kineto model/trace_times
    """,
    "unit/traces/test_trace.py": """
        reports/trace_notebook reports/trace_terminal
    """,
    "unit/verification/relay/test_node_relay.py": """
        verification/relay/connection
    """,
    "unit/verification/test_cycles.py": """
        verification/peers verification/refusals
    """,
    "unit/verification/test_verifier_start.py": """
        model/refusal
    """,
    "unit/watch/mismatches/test_deferred_verification.py": """
        watch/mismatches/channel_progress watch/mismatches/comparison
        watch/mismatches/report watch/mismatches/signatures
    """,
    "unit/watch/nodes/test_remote_evidence.py": """
        watch/snapshot
    """,
    "unit/watch/test_diagnoser.py": """
        dumps/garbage
    """,
    "unit/watch/test_watcher.py": """
        diagnosis/index/activity watch/job_abort
    """,
}
"""Test -> the modules that it tests, which have no test of their own ("/*": all of a folder). It may
only shrink.
"""


def holds_code(path: Path) -> bool:
    return bool(re.search(r"^(def|class|async def) ", path.read_text(encoding="utf-8"), re.M))


def module_of(path: Path) -> Path:
    """A package is the module beside its folder."""
    return path.parent if path.name == "__init__.py" else path.with_suffix("")


MODULES = {
    module_of(path.relative_to(PACKAGE))
    for path in PACKAGE.rglob("*.py")
    if holds_code(path) and path.name != "__main__.py" and path.parent.name != "programs"
} - {Path()}
PACKAGES = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py")} - {Path()}


def has_test(module: Path) -> bool:
    folder = UNIT / module.parent
    names = {path.stem for path in folder.glob("test_*.py")}
    return any(
        name == f"test_{module.name}" or name.startswith(f"test_{module.name}_") for name in names
    )


def test_every_module_has_a_test_at_its_path():
    listed = {module for modules in NOT_YET.values() for module in modules.split()}
    without = {module.as_posix() for module in MODULES if not has_test(module)}
    unlisted = {name for name in without if not listed & {name, f"{Path(name).parent}/*"}}
    assert not unlisted, "write a test at the path of each of these modules"
    needless = {name for name in listed if not any(fnmatch(other, name) for other in without)}
    assert not needless, "these have a test, or are gone: take them out of NOT_YET"
    for test in NOT_YET:
        assert (UNIT.parent / test).exists(), f"NOT_YET: {test} is gone"


def test_every_test_lies_at_the_path_of_a_module():
    """Tests of the whole package lie at the top, beside the folders of the rooms."""
    strays = []
    for path in UNIT.rglob("*/test_*.py"):
        relative = path.relative_to(UNIT)
        if len(relative.parts) > 1 and not any(
            module.parent == relative.parent
            and f"{relative.stem}_".startswith(f"test_{module.name}_")
            for module in MODULES | PACKAGES
        ):
            strays.append(str(relative))
    assert not strays
