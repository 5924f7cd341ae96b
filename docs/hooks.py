"""The site's view of links that leave docs/: some files are pages of it, the rest is plain text."""

import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parent.parent
SHOWN = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "tests/benchmarks/README.md": "benchmarks.md",
    "configs/smollm2_words.png": "smollm2_words.png",
}
BLOCK_OR_CODE = re.compile(r"<pre.*?</pre>|<code>([^<]*)</code>", re.DOTALL)
RELATIVE_LINK = re.compile(r"(!?\[([^\]]*)\])\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the files from outside docs/."""
    for source, uri in SHOWN.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites the links of a page, which are those of the repository."""
    sources = {uri: source for source, uri in SHOWN.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewrite(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[3]))
        if target.startswith("docs/"):
            uri = target.removeprefix("docs/")
        elif target in SHOWN:
            uri = SHOWN[target]
        else:
            return link[2]
        return f"{link[1]}({uri}{link[4] or ''})"

    return RELATIVE_LINK.sub(rewrite, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Puts each word of inline code into a span, since browsers break flags after their hyphens."""

    def in_spans(found: re.Match) -> str:
        if found[1] is None:
            return found[0]
        return "<code>" + " ".join(f"<span>{word}</span>" for word in found[1].split()) + "</code>"

    return BLOCK_OR_CODE.sub(in_spans, html)
