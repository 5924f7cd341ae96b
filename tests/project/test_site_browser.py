"""The site as a browser shows it from a folder: search, every page at three widths, no network."""

import os
import subprocess
import sys

import pytest
from browser import CHROMIUM, browser
from shown_commands import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH"),
]
WIDTHS = (390, 1100, 1440)
LOADED = "document.readyState == 'complete' && location.protocol == 'file:'"
BOX = "document.querySelector('[data-md-component=search-query]')"
TYPE = f"""(() => {{
    const box = {BOX};
    box.focus();
    box.value = '%s';
    for (const kind of ['input', 'keyup']) box.dispatchEvent(new Event(kind, {{bubbles: true}}));
}})()"""
FOUND = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
# Elements that reach over the right edge and can't be scrolled into view.
CUT_OFF = """[...document.querySelectorAll('article *')].filter(element =>
    element.getBoundingClientRect().right > innerWidth + 1
    && !element.closest('.md-typeset__scrollwrap, pre, .md-typeset__table, .highlight')
).map(element => element.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        check=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    return folder


@pytest.mark.parametrize("width", WIDTHS)
def test_search_finds_a_page_without_a_server(site, tmp_path, width):
    with browser(tmp_path / "profile") as page:
        page.open(site / "index.html", width, ready=f"{LOADED} && {BOX}")
        page.run(TYPE % "overlong punishment")
        page.wait("document.querySelector('.md-search-result__item')")
        assert any("algorithms.html" in link for link in page.run(FOUND))
        page.run(TYPE % "zzyzx")
        page.wait("!document.querySelector('.md-search-result__item')")
        assert not page.trouble
        assert all(address.startswith(("file:", "data:")) for address in page.asked)


def test_no_page_is_cut_off_or_complains(site, tmp_path):
    pictures = ROOT / "build/site_pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    problems = []
    with browser(tmp_path / "profile") as page:
        for file in sorted(set(site.glob("*.html")) - {site / "404.html"}):  # a server's
            for width in WIDTHS:
                page.open(file, width, ready=f"{LOADED} && location.href.includes('{file.name}')")
                problems += [f"{file.name} at {width}: {cut}" for cut in page.run(CUT_OFF)]
                page.screenshot(pictures / f"{file.stem}_{width}.png")
        problems += [str(said) for said in page.trouble]
        assert all(address.startswith(("file:", "data:")) for address in page.asked)
    assert not problems, "\n".join(problems)
