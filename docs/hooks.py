"""The site's page of all settings, and its view of links that leave docs/."""

import dataclasses
import html
import inspect
import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files

from dapo_jax.config.experiment import Config, ExportConfig
from dapo_jax.config.settings import AUTO, TYPE_NAMES, explain, leaves, takes_auto
from dapo_jax.extras.doctor import DoctorConfig
from dapo_jax.extras.init import InitConfig
from dapo_jax.extras.report.command import ReportConfig
from dapo_jax.extras.samplers.settings import SamplerConfig
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.extras.sft.settings import DpoConfig, SftConfig

ROOT = pathlib.Path(__file__).parent.parent
SHOWN = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "tests/benchmarks/README.md": "benchmarks.md",
    "configs/smollm2_words.png": "smollm2_words.png",
}
KINDS = (Config, SftConfig, DpoConfig, ExportConfig, ReportConfig, InitConfig, DoctorConfig)
KINDS += (SamplerConfig, ServeConfig)
BLOCK_OR_CODE = re.compile(r"<pre.*?</pre>|<code>([^<]*)</code>", re.DOTALL)
RELATIVE_LINK = re.compile(r"(!?\[([^\]]*)\])\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


SETTINGS = """\
# Settings

All settings, generated from the code. On a command line, `sampler.temperature` of `dapo-jax train`
is `--config.sampler.temperature=0.7`; in a config file, `Sampler(temperature=0.7)`; in YAML,
`temperature: 0.7` below `sampler:`. The box at the top searches this page too, and so does
`dapo-jax train --help=WORD`. `help(dapo_jax.Sampler)` shows a section in Python. The
[recipes](recipes.md) begin with what you want to do.
"""


def list_settings(section: Any, prefix: str, anchor: str) -> str:
    """Return the settings of a section itself: name, default, type, explanation, allowed values."""
    entries = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            continue
        default = "auto" if takes_auto(field) and value == AUTO else value
        default = str(default).lower() if isinstance(default, bool) else default
        shown = "empty" if default == "" else f"<code>{html.escape(str(default))}</code>"
        name, kind = (
            f"{prefix}{field.name}",
            TYPE_NAMES[type(value)] + " or auto" * takes_auto(field),
        )
        entries.append(f'<dt id="{anchor}{name}"><code>{name}</code> {kind}; default: {shown}</dt>')
        text = re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(explain(field), quote=False))
        entries.append(f"<dd>{text}</dd>")
    return "\n".join(['<dl class="settings">', *entries, "</dl>\n"]) if entries else ""


def list_sections(config: Any, prefix: str, seen: dict[type, str], anchor: str) -> list[str]:
    """Return the text of a config's sections. Those that an earlier config has are only named."""
    parts = []
    for field in dataclasses.fields(config):
        section, name = getattr(config, field.name), f"{prefix}{field.name}"
        if not dataclasses.is_dataclass(section):
            continue
        kind = type(section)
        defaults = {path: value for path, _, value in leaves(kind())}
        changed = [f"`{p}={v}`" for p, _, v in leaves(section) if v != defaults[p]]
        if kind in seen:
            text = f"\n`{name}`: [as above](#{seen[kind]})"
            parts.append(text + f", by default {', '.join(changed)}" * bool(changed) + ".\n")
            continue
        seen[kind] = f"{anchor}{name}"
        text = (inspect.getdoc(kind) or "").split("\n\n")[0]
        title = f"### {name} {{ #{anchor}{name} }}\n\n{text}\n"
        parts += [title, list_settings(section, f"{name}.", anchor)]
        parts += list_sections(section, f"{name}.", seen, anchor)
    return parts


def settings_page() -> str:
    """Return the page of all settings: of `dapo-jax train` by section, then of other commands."""
    parts, seen = [SETTINGS], {}
    for kind in KINDS:
        title = (inspect.getdoc(kind) or "").split("\n")[0]
        command = re.findall(r"dapo-jax (\w+)", title)[0]
        anchor = "" if kind is Config else f"{command}-"
        parts += [f"## dapo-jax {command}\n\n{title}\n", list_settings(kind(), "", anchor)]
        parts += list_sections(kind(), "", seen, anchor)
    return "\n".join(parts)


def on_files(files: Files, config: Any) -> Files:
    """Adds the page of settings, and the files from outside docs/."""
    files.append(File.generated(config, "settings.md", content=settings_page()))
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
