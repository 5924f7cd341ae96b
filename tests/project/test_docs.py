"""Links of the documentation lead somewhere, its commands are accepted, the site builds."""

import html
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from shown_commands import ROOT, commands_of, tokens_of, what_is_wrong

import dapo_jax
from dapo_jax.config.experiment import Config
from dapo_jax.config.settings import AUTO, explain, fields, leaves, takes_auto
from dapo_jax.types.rules import TYPE_NAMES

PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    + [ROOT / "tests/benchmarks/README.md"]
)
# One runs in test_packaging.py, the other names commands of the past.
UNCHECKED = {"quickstart.md", "CHANGELOG.md"}
EACH = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: pathlib.Path) -> set[str]:
    """Return the anchors that GitHub and the site make of a page's headings."""
    slugs = []
    tokens = tokens_of(page)
    for opening, inline in zip(tokens, tokens[1:], strict=False):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children)
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            slugs.append(f"{slug}_{slugs.count(slug)}" if slug in slugs else slug)
    return set(slugs)


def broken_links(page: pathlib.Path) -> list[str]:
    """Return the relative links of a page that lead nowhere, with the reason."""
    links = [token.attrGet("href") or token.attrGet("src") for token in tokens_of(page)]
    problems = []
    for link in filter(None, links):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if re.match(r"https?://", link):
            continue
        if not target.exists():
            problems.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(target):
            problems.append(f"{link}: no such heading")
    return problems


@pytest.fixture
def in_the_root(monkeypatch, write_module):
    """Change to the root of the repository, and write the modules that a page shows."""
    monkeypatch.chdir(ROOT)
    texts: dict[str, str] = {}
    for page in PAGES:
        for token in tokens_of(page):
            if named := re.match(r"# (\w+)\.py\n", token.content):
                texts[named[1]] = texts.get(named[1], "") + token.content
    for name, text in texts.items():
        write_module(name, text)


@EACH
def test_every_link_leads_somewhere(page):
    assert not broken_links(page)


@EACH
def test_every_command_is_accepted(page, in_the_root):
    if page.name in UNCHECKED:
        return
    problems = []
    for words, excuse in commands_of(page):
        problem = what_is_wrong(words)
        if problem is None and not excuse:
            problem = "no check knows it: mark the fence hardware, cloud or network"
        if problem:
            problems.append(f"{shlex.join(words)}: {problem}")
    assert not problems, "\n".join(problems)


def test_every_answer_to_a_problem_names_a_test_that_exists():
    rows = re.findall(r"`(test_\w+)` \|$", (ROOT / "docs/tpu_problems.md").read_text(), re.M)
    code = "".join(path.read_text() for path in ROOT.glob("tests/*/test_*.py"))
    assert len(rows) == 10 and not [name for name in rows if f"def {name}(" not in code]


def test_the_glossary_is_in_order_and_every_word_has_a_link():
    glossary = (ROOT / "docs/glossary.md").read_text()
    lines = [line for line in glossary.splitlines() if line.startswith("- ")]
    rows = [re.fullmatch(r"- \[(.+?)\]\(\w+\.md[^)]*\): \S.*\.", line) for line in lines]
    assert all(rows), [line for line, row in zip(lines, rows, strict=True) if not row]
    words = [row[1].casefold() for row in rows]
    assert words == sorted(words) and len(words) > 25


def test_the_page_lists_what_a_resumed_run_may_change():
    text = (ROOT / "docs/reliability.md").read_text().partition("These may change:\n\n")[2]
    shown, name = [], ""
    for code in re.findall("`([^`]+)`", text.partition("\n\n")[0]):
        name = name.rpartition(".")[0] + code if code.startswith(".") else code
        shown.append(name)
    may = {name for name, field in fields(Config).items() if field.metadata["may_change"]}
    listed = {n for n in fields(Config) for s in shown if f"{n}.".startswith(f"{s}.")}
    assert listed - {"rollout.carry_over"} == may


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {dapo_jax.__version__}\n" in text and "\nlicense: Apache-2.0\n" in text
    assert f"\n## {dapo_jax.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@EACH
def test_every_python_example_compiles(page):
    for token in tokens_of(page):
        if token.type == "fence" and token.info == "python":
            compile(token.content, str(page), "exec")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    return folder


def test_the_page_of_settings_has_all_of_them_once(site):
    page = (site / "settings.html").read_text(encoding="utf-8")
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    text = html.unescape(re.sub("<[^>]*>", "", page))
    for name, field, value in leaves(Config()):
        if not name.startswith("critic.optimizer."):  # named as a section
            assert name in ids
            auto = AUTO if takes_auto(field) else None
            shown = {auto: "auto", True: "true", False: "false", "": "empty"}.get(value, value)
            shown = value if type(value) in (int, float) and value != auto else shown
            kind = TYPE_NAMES[type(value)] + " or auto" * bool(auto)
            assert f"{name} {kind}; default: {shown}" in text, name
            assert explain(field).replace("`", "") in text, name
    assert {"sft-start", "serve-http_port", "sampler-slots", "sft-data.passes"} < set(ids)


def test_the_site_loads_nothing_from_elsewhere(site):
    assert {page.stem for page in ROOT.glob("docs/*.md")} <= {p.stem for p in site.glob("*.html")}
    assert "nothing is downloaded unasked" in (site / "install.html").read_text(encoding="utf-8")
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'(?:src="|<link rel="stylesheet" href=")((?:https?:)?//[^"]+)', text)
        assert not loaded, f"{page.name}: {loaded}"
        assert 'data-md-component="search-query"' in text, f"{page.name}: no box to search in"
        assert 'iframe-worker.js"></script>' in text, f"{page.name}: no search without a server"
    index = (site / "search/search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index") and "glossary.html" in index
