"""The documentation runs, links to what exists, and names every setting, error, statistic, module and method of a contract."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import pytest

from oasiskv import OasisConfig, Stats, abc, errors, tiers
from oasiskv.testing import faults, kits

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NAMES = [page.relative_to(DOCS).as_posix() for page in PAGES]

_FENCE = re.compile(r"^( *)```(.*)$")
_HEADING = re.compile(r"^(#{1,6}) +(.*?) *$")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_OUTPUT = 'text title="Output"'


@dataclass
class Block:
    """A fenced block: what its fence says, where its first line is, and what it holds."""

    info: str
    line: int
    text: str


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def split(text: str) -> tuple[list[Block], str]:
    """The fenced blocks of a page, and the page without them."""
    blocks: list[Block] = []
    prose: list[str] = []
    inside: list[str] | None = None
    indent, info, start = "", "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if inside is None and fence:
            indent, info = fence.groups()
            inside, start = [], number + 1
        elif inside is not None and fence and not fence.group(2):
            blocks.append(Block(info, start, "\n".join(part.removeprefix(indent) for part in inside)))
            inside = None
        elif inside is not None:
            inside.append(line)
        else:
            prose.append(line)
    assert inside is None, f"the fence before line {start} is not closed"
    return blocks, "\n".join(prose)


def anchors(name: str) -> set[str]:
    """What the headings of a page can be linked by."""
    found = set()
    for line in split(read(name))[1].splitlines():
        heading = _HEADING.match(line)
        if heading:
            plain = re.sub(r"[^\w\s-]", "", heading.group(2)).strip().lower()
            found.add(re.sub(r"[-\s]+", "-", plain))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_python_blocks_run_and_print_what_the_page_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks, _ = split(read(name))
    namespace = {"__name__": "page"}
    for number, block in enumerate(blocks):
        if block.info != "python":
            continue
        code = compile("\n" * (block.line - 1) + block.text, str(DOCS / name), "exec")
        capsys.readouterr()
        exec(code, namespace)
        printed = capsys.readouterr().out
        follower = blocks[number + 1] if number + 1 < len(blocks) else None
        if follower is not None and follower.info == _OUTPUT:
            assert printed.rstrip() == follower.text.rstrip(), (
                f"{name}: the output below line {block.line} is not what is printed"
            )


@pytest.mark.parametrize("name", NAMES)
def test_every_output_follows_the_block_that_prints_it(name: str) -> None:
    blocks, _ = split(read(name))
    for before, block in zip([None, *blocks], blocks, strict=False):
        assert block.info != _OUTPUT or (before is not None and before.info == "python"), f"{name}: line {block.line}"


@pytest.mark.parametrize("name", NAMES)
def test_internal_links_lead_somewhere(name: str) -> None:
    for target in _LINK.findall(split(read(name))[1]):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        page = ((DOCS / name).parent / path).resolve() if path else DOCS / name
        assert page.is_file(), f"{name} links to {target}, which is not there"
        assert page.is_relative_to(DOCS), f"{name} links to {target}, which is no page"
        if anchor:
            assert anchor in anchors(page.relative_to(DOCS).as_posix()), f"{name} links to {target}; there is no such heading"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_one_title_and_a_place_in_the_navigation(name: str) -> None:
    titles = [line for line in split(read(name))[1].splitlines() if line.startswith("# ")]
    assert len(titles) == 1, f"{name} has {len(titles)} titles"
    assert re.search(rf"^ *- (.*: )?{re.escape(name)}$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE), (
        f"{name} is not in nav"
    )


def test_every_setting_is_documented_with_its_default() -> None:
    page = read("configuration.md")
    for field in fields(OasisConfig):
        assert field.default is not MISSING
        default = f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
        row = f"| [`{field.name}`](#{field.name}) | `{default}` |"
        assert row in page, f"the table of configuration.md lacks: {row}"
        assert f"\n### `{field.name}`\n" in page, f"configuration.md has no section on {field.name}"
    documented = set(re.findall(r"^### `(\w+)`$", page, re.MULTILINE))
    assert documented == set(OasisConfig.names())


def test_every_error_is_documented() -> None:
    defined = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.OasisError)}
    documented = set(re.findall(r"^## `(\w+)`$", read("errors.md"), re.MULTILINE))
    assert documented == defined


def test_every_statistic_is_documented() -> None:
    page = read("memory.md")
    for field in fields(Stats):
        assert f"| `{field.name}` |" in page, f"memory.md does not say what Stats.{field.name} is"


def test_every_module_has_its_line() -> None:
    page = read("architecture.md")
    modules = [path for room in ("oasiskv", "adapters", "kernels") for path in (ROOT / room).rglob("*.py")]
    names = {path.relative_to(ROOT).as_posix() for path in modules}
    named = {name for name in names if Path(name).name not in ("__init__.py", "__main__.py")}
    documented = set(re.findall(r"^\| `([\w/]+\.py)` \|", page, re.MULTILINE))
    assert named - documented == set(), "modules without a line in architecture.md"
    assert documented - names == set(), "lines in architecture.md about modules that are not there"


CONTRACTS = {
    "plugins.md": (abc.KeySummary, abc.Predictor, abc.QueryProjection, abc.LayerWork, abc.Ticket, abc.TransferScheduler),
    "write-a-tier.md": (tiers.TierStore, tiers.MetadataStore, tiers.TierTraits, faults.FaultKind),
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in CONTRACTS.items() for kind in kinds])
def test_every_member_of_a_contract_is_documented(name: str, kind: type) -> None:
    page = read(name)
    for member in {**vars(kind), **getattr(kind, "__annotations__", {})}:
        if not member.startswith("_"):
            assert re.search(rf"`{member}\b", page), f"{name} does not say what {kind.__name__}.{member} is for"


def test_every_conformance_kit_is_documented() -> None:
    for name, kit in vars(kits).items():
        if name.endswith("Tests"):
            assert f"`{kit.__name__}`" in read("plugins.md"), f"plugins.md does not say what {name} is for"


def test_every_decision_has_its_four_headings() -> None:
    for page in (DOCS / "adr").glob("[0-9]*.md"):
        headings = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert headings == ["Problem", "Decision", "What follows", "Not chosen"], page.name


def test_decisions_are_numbered_and_listed() -> None:
    index = read("adr/index.md")
    decisions = sorted(page.name for page in (DOCS / "adr").glob("[0-9]*.md"))
    assert [name[:4] for name in decisions] == [f"{number:04}" for number in range(1, len(decisions) + 1)]
    for name in decisions:
        assert f"]({name})" in index, f"adr/index.md does not list {name}"
