"""`oasiskv doctor`, as a person and as a machine calls it."""

import argparse
import json
import re
import subprocess
import sys
from importlib import metadata

import pytest

from oasiskv import probe
from oasiskv.cli import doctor, main
from oasiskv.errors import IntegrityError, LayoutMismatch, TierUnavailable
from oasiskv.probe import Measurement
from oasiskv.tiers.memory import MemoryStore

SMALL = ("--seconds", "0.01", "--model", "smollm2")


@pytest.fixture(autouse=True)
def _small_arena(monkeypatch):
    monkeypatch.setattr(probe, "_ARENA_BYTES", 4 << 20)


def call(capsys, *options):
    code = main(["doctor", *SMALL, *options])
    return code, *capsys.readouterr()


def test_a_person_reads_machine_rates_arithmetic_and_verdict(capsys):
    code, out, err = call(capsys, "--tier", "memory:?limit=1GiB", "--context", "8192")
    assert (code, err) == (0, "")
    for part in ("MACHINE", "MEASURED", "NEEDED", "VERDICT", f"oasiskv {metadata.version('oasiskv')}"):
        assert part in out
    assert "4 new blocks per head and step x 3 heads x 30 layers x 8,192 bytes x batch of 1 x 20 steps/s = 0.059 GB/s" in out
    assert re.search(r"memory: +load +8 KiB +12 ", out)
    assert re.search(r"host memory (keeps up|CANNOT keep up): gives", out)
    assert "50 GB/s does not feed a busy GPU" in out
    assert "limit" not in out


def test_a_machine_reads_json(capsys):
    code, out, _ = call(capsys, "--tier", "memory:", "--json", "--batch", "2", "--tokens-per-s", "10")
    report = json.loads(out)
    assert code == 0
    assert report["demand"]["bytes_per_s"] == 4 * 3 * 30 * 8192 * 2 * 10
    assert {one["tier"] for one in report["measurements"]} >= {"host memory", "memory:"}
    assert {verdict["tier"] for verdict in report["verdicts"]} >= {"host memory", "memory:"}
    assert report["machine"]["cores"] >= 1
    assert report["ops"]["copy_blocks"]["cpu"] in ("native", "reference")
    assert report["problems"] == {}


def measurement(tier, rate, read_bytes=8192, batch=12, direction="load"):
    return Measurement(tier, direction, read_bytes, batch, 5, rate, 0.001, 0.002)


def options(*more):
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    return parser.parse_args(["doctor", "--model", "smollm2", *more])


def test_who_keeps_up_is_judged_by_reads_of_one_block_as_a_layer_makes_them():
    demand = doctor.read_demand(options())  # 58,982,400 bytes/s
    measured = [
        measurement("near", 9e9, batch=1),
        measurement("near", 59e6),
        measurement("near", 1e6, direction="store"),
        measurement("far", 900e6, read_bytes=131072),
        measurement("far", 29_491_200.0),
    ]
    near, far = doctor.judge(demand, measured)
    assert (near.tier, near.keeps_up, near.bytes_per_s) == ("near", True, 59e6)
    assert (far.tier, far.keeps_up, far.tokens_per_s) == ("far", False, 10.0)
    lines = doctor.verdict_lines(demand, [near, far])
    assert lines[0] == "near keeps up: gives 0.059 GB/s where 0.059 GB/s are needed"
    assert lines[1] == (
        "far CANNOT keep up: gives 0.0295 GB/s where 0.059 GB/s are needed; enough for 10 of 20 tokens/s, "
        "or for 2 new blocks per head and step"
    )
    assert lines[2].endswith("In your figures that is a GPU that writes 16,954 tokens/s; you ask for 20")


def test_a_context_that_fits_loads_nothing(capsys):
    code, out, _ = call(capsys, "--context", "2048")
    assert code == 0
    assert "2048 tokens fit the budget of 2048: nothing is loaded" in out
    assert json.loads(call(capsys, "--context", "2048", "--json")[1])["verdicts"][0]["tokens_per_s"] is None


def test_large_batches_are_measured_in_part(capsys, monkeypatch):
    monkeypatch.setattr(probe, "MOST_CALL_BYTES", 64 * 8192)
    report = json.loads(call(capsys, "--batch", "512", "--json")[1])
    assert report["demand"]["reads_per_call"] == 4 * 3 * 512
    assert max(one["batch"] for one in report["measurements"]) == 64


def test_a_tier_that_breaks_in_the_middle_is_not_judged(capsys, monkeypatch):
    load = MemoryStore.load

    async def one_only(self, reads):
        if len(reads) > 1:
            raise TierUnavailable("too many")
        return await load(self, reads)

    monkeypatch.setattr(MemoryStore, "load", one_only)
    code, out, _ = call(capsys, "--tier", "memory:", "--json")
    report = json.loads(out)
    assert code == 1
    assert report["problems"] == {"memory:": "too many"}
    assert [one["direction"] for one in report["measurements"] if one["tier"] == "memory:"] == ["store", "load"]
    assert "memory:" not in {verdict["tier"] for verdict in report["verdicts"]}


def test_a_tier_is_named_without_its_options_and_told_from_others():
    names = doctor.tier_names(["file:/a?limit=1GiB", "file:/b", "file:/a?direct=yes", "file:/a"])
    assert names == ["file:/a", "file:/b", "file:/a (2)", "file:/a (3)"]


def test_a_model_of_ones_own():
    demand = doctor.read_demand(options("--layers", "2", "--kv-heads", "4", "--head-dim", "32", "--dtype", "float16"))
    assert demand.slot_bytes == 2 * 16 * 32 * 2
    assert demand.step_bytes == 4 * 4 * 2 * 2048


@pytest.mark.parametrize("error", [TierUnavailable, LayoutMismatch, IntegrityError])
def test_a_tier_that_fails_is_told_and_the_rest_is_measured(capsys, monkeypatch, error):
    async def fail(self):
        raise error("it is broken")

    monkeypatch.setattr(MemoryStore, "open", fail)
    code, out, err = call(capsys, "--tier", "memory:somewhere")
    assert code == 1
    assert "host memory" in out
    assert "memory:somewhere: could not be measured: it is broken" in err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tier", "nonsense"], "tier 'nonsense' is no location"),
        (["--tier", "floppy:/a"], "no plug-in 'floppy'.*memory"),
        (["--tier", "memory:?nonsense=1"], "has no option 'nonsense'"),
        (["--budget", "100"], "budget_tokens is 100"),
        (["--layers", "0"], "num_layers is 0"),
        (["--batch", "0"], "batch is 0"),
        (["--tokens-per-s", "nan"], "steps_per_s is nan"),
        (["--seconds", "0"], "--seconds is 0"),
    ],
)
def test_bad_settings(capsys, more, message):
    code, out, err = call(capsys, *more)
    assert (code, out) == (2, "")
    assert re.search(message, err), err


def test_ctrl_c_ends_it_without_a_traceback(capsys, monkeypatch):
    async def interrupt(self, reads):
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryStore, "load", interrupt)
    code, out, err = call(capsys, "--tier", "memory:")
    assert (code, out) == (130, "")
    assert "interrupted" in err
    assert "Traceback" not in err


def test_it_needs_no_extra():
    program = (
        "import sys\n"
        "for name in ('rich', 'transformers', 'prometheus_client'): sys.modules[name] = None\n"
        "from oasiskv.cli import main\n"
        "sys.exit(main(['doctor', '--seconds', '0.01', '--json', '--tier', 'memory:', '--model', 'smollm2']))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["verdicts"]
