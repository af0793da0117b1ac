"""report.html: one file, without scripts and without anything from the network; for screens, phones, dark and print."""

from collections.abc import Collection, Mapping
from html import escape
from typing import Any

from eval import compare, curve_plots, plots, tables, words
from eval.budget import side_budget
from eval.curves import MECHANISM
from eval.report import Report, mechanism

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --ink: #1a1a1a; --soft: #5a5a5a; --line: #d0d0d0; --alarm: #a3190b; }
@media (prefers-color-scheme: dark) {
  :root { --back: #161616; --ink: #e8e8e8; --soft: #a8a8a8; --line: #444; --alarm: #ff9a8d; }
}
@media print {
  :root { --back: #fff; --ink: #000; --soft: #333; --line: #999; --alarm: #000; }
  figure, tr { break-inside: avoid; }
  .scroll { overflow: visible; }
  .scroll.wide table { font-size: 5.5pt; } .scroll.wide :is(th, td) { padding: 1pt 2pt; white-space: normal; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 1260px; background: var(--back); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.1rem; margin: 0 0 .5rem; color: var(--soft); }
h2 { font-size: 1.1rem; margin: 1.8rem 0 .5rem; }
.first { font-size: 1.25rem; font-weight: 700; margin: .3rem 0 .6rem; }
.alarm { color: var(--alarm); border-left: 6px solid var(--alarm); padding-left: .7rem; }
.more { font-weight: 600; margin: .3rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .18rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap;
  overflow-wrap: normal; }
th:first-child, td:first-child { text-align: left; }
tr.lost td { font-weight: 700; color: var(--alarm); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .9rem; margin: 0; font-size: .85rem; }
dt { color: var(--soft); } dd { margin: 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 470px), 1fr)); gap: 1.2rem;
  align-items: start; }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; font-size: .85rem; margin-bottom: .2rem; }
figure svg { width: 100%; max-width: 600px; height: auto; display: block; color: var(--ink); }
@media (max-width: 520px) {
  table { font-size: .62rem; } th, td { padding: .15rem .2rem; white-space: normal; }
}
ul { padding-left: 1.1rem; font-size: .85rem; }
"""


def to_html(report: Report) -> str:
    """The text of report.html."""
    title = f"Evaluation of {report.side.label}"
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>",
        *_headline(report),
        *_aggregates(report),
    ]
    pictures = plots.score_plots(report)
    parts += _figures("Scores", pictures)
    parts.append(f"<h2>Tasks</h2>{_table(*tables.task_table(report), lost=_lost(report))}")
    parts += _figures("Training", curve_plots.curve_plots(report))
    parts += _mechanism(report)
    parts.append(f"<h2>Tasks in full</h2>{_table(*tables.detail_table(report), wide=True)}")
    parts.append(_budget(report))
    rows = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in words.identity_lines(report))
    parts.append(f"<h2>What was measured</h2><dl>{rows}</dl>")
    notes = "".join(f"<li>{escape(note)}</li>" for note in words.notes(report))
    parts.append(f"<h2>How sure it is</h2><ul>{notes}</ul>\n</body>\n</html>\n")
    return "\n".join(parts)


def _headline(report: Report) -> list[str]:
    sentences = words.headline(report)
    alarm = bool(report.forced or report.missing or (report.change is not None and report.change.fallen()))
    found = []
    for i, sentence in enumerate(sentences):
        kind = f"first{' alarm' if alarm else ''}" if i == 0 else "more"
        found.append(f'<p class="{kind}">{escape(sentence)}</p>')
    return found


def _aggregates(report: Report) -> list[str]:
    found = []
    for title, (columns, rows) in (("Aggregates", tables.aggregate_table(report)), ("Change", tables.change_table(report))):
        if rows:
            found.append(f"<section><h2>{title}</h2>{_table(columns, rows)}</section>")
    return ['<div class="plots">', *found, "</div>"] if found else []


def _figures(title: str, pictures: list[plots.Plot]) -> list[str]:
    if not pictures:
        return []
    found = [f'<h2>{title}</h2>\n<div class="plots">']
    for picture in pictures:
        svg = picture.svg.replace("<svg ", f'<svg role="img" aria-label="{escape(picture.alt)}" ', 1)
        found.append(f'<figure id="{picture.key}"><figcaption>{escape(picture.title)}</figcaption>{svg}</figure>')
    return [*found, "</div>"]


def _mechanism(report: Report) -> list[str]:
    found = mechanism(report.side)
    measured = found["tasks"].values()
    columns = [name for name in MECHANISM if any(row[name] is not None for row in measured)]
    if not columns:
        return []
    rows = [
        [task, *("-" if row[name] is None else f"{row[name]:.4g}" for name in columns)] for task, row in found["tasks"].items()
    ]
    age = found["sample_age_versions_mean"]
    text = "" if age is None else f"<p>Sample age: {age:.1f} updates on average.</p>"
    table = _table(["task", *(name.replace("_", " ") for name in columns)], rows)
    return [f"<h2>Mechanism, at the end of training</h2>{table}{text}{_network(found['network'])}"]


def _network(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    rows = []
    for name, layer in found["layers"].items():
        live = "-" if layer["live_units"] is None else f"{layer['live_units']} of {layer['units']}"
        rows.append([name, live, "-" if layer["relative_step"] is None else f"{layer['relative_step']:.2e}"])
    share = found["value_gradient_share"]
    text = "" if share is None else f"<p>The value's share of the gradient's norm: {100 * share:.0f}%.</p>"
    return _table(["layer", "live units", "step of a batch over the weights"], rows) + text


def _budget(report: Report) -> str:
    found = side_budget(report.side)
    known = [("frames", "environment frames"), ("updates", "updates"), ("seconds", "seconds of training")]
    texts = [f"{found[name]:,.0f} {unit}" for name, unit in known if found[name] is not None]
    if found["evaluation_frames"]:
        texts.append(f"{found['evaluation_frames']:,} frames of evaluation")
    return f"<h2>Budget</h2><p>{escape(', '.join(texts) or 'not known')}</p>{_table(*tables.budget_table(report))}"


def _cell(text: str) -> str:
    """The text, which may break after an underscore: names of tasks are long, and screens narrow."""
    return escape(text).replace("_", "_<wbr>")


def _table(columns: list[str], rows: list[list[str]], lost: Collection[str] = (), wide: bool = False) -> str:
    """lost: first cells of the rows that stand out. wide: has to shrink to fit on paper."""
    head = "".join(f'<th scope="col">{_cell(column)}</th>' for column in columns)
    body = "".join(
        f"<tr{' class=lost' if row[0] in lost else ''}>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>"
        for row in rows
    )
    kind = "scroll wide" if wide else "scroll"
    return f'<div class="{kind}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _lost(report: Report) -> list[str]:
    """Tasks that are lost, or have fallen beyond the margin where nothing could be tested against chance."""
    if report.change is None:
        return []
    untested = [task for task in report.change.fallen() if report.change.tasks[task].verdict == compare.NOT_TESTED]
    return [*report.change.named(compare.LOST), *untested]
