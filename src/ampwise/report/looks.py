"""How the page looks: colours in the light and in the dark, and little else."""

from __future__ import annotations

__all__ = ["CSS"]

CSS = """
:root {
  color-scheme: light dark;
  --ground: #fbfbf9; --card: #fff; --ink: #1d2126; --soft: #646b75; --rule: #e2e3df; --code: #f4f4f0;
  --error: #c2362f; --warning: #a06400; --info: #1b6f94; --ok: #2c7a4b; --mark: #fdeecb;
  --line0: #2f6fc4; --line1: #b0538c; --line2: #3c8a5c; --line3: #a8722a; --line4: #6a5fc0; --line5: #4a8f97;
  --lost: #d0534d; --subnormal: #e3a23c; --normal: #5b8fd6; --overflow: #8e5bb5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #15171a; --card: #1c1f23; --ink: #e3e5e8; --soft: #98a0aa; --rule: #31353b; --code: #24282d;
    --error: #f0807a; --warning: #e5b567; --info: #74bfe0; --ok: #7ecb98; --mark: #4a3d1c;
    --line0: #7fb0f0; --line1: #dd8fbd; --line2: #80c79b; --line3: #dcae6d; --line4: #aba2f0; --line5: #86c6cd;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 22px; line-height: 1.35; margin: 0 0 8px; overflow-wrap: anywhere; }
h1.error, .tag.error { color: var(--error); } h1.warning, .tag.warning { color: var(--warning); }
h1.info, .tag.info { color: var(--info); } h1.ok { color: var(--ok); }
h2 { font-size: 17px; margin: 36px 0 10px; }
h3 { font-size: 15px; margin: 0 0 6px; overflow-wrap: anywhere; font-weight: 400; }
p { margin: 6px 0; overflow-wrap: anywhere; }
.soft, figcaption, th { color: var(--soft); }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 14px 16px;
  margin: 12px 0; border-left: 4px solid var(--rule); }
.card.error { border-left-color: var(--error); } .card.warning { border-left-color: var(--warning); }
.card.info { border-left-color: var(--info); }
.tag { font-weight: 700; }
code, pre { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
h1 code { font-size: inherit; }
code { overflow-wrap: anywhere; unicode-bidi: isolate; }
pre { background: var(--code); border-radius: 6px; padding: 8px 0; margin: 8px 0; overflow-x: auto; }
pre span { display: block; padding: 0 12px; white-space: pre; min-width: max-content; }
pre .here { background: var(--mark); }
pre i { color: var(--soft); font-style: normal; user-select: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { font-weight: 400; text-align: right; font-size: 13px; }
td { text-align: right; border-top: 1px solid var(--rule); white-space: nowrap; }
th, td { padding: 4px 14px 4px 0; vertical-align: middle; }
th:first-child, td:first-child, .left { text-align: left; }
td.name, td.text { white-space: normal; overflow-wrap: anywhere; }
td.text, td.pair { text-align: left; }
td.pair { width: 75%; white-space: normal; overflow-wrap: anywhere; }
td.name { min-width: 130px; }
th:first-child, td.name { position: sticky; left: 0; background: var(--ground); }
sup { font-size: 75%; line-height: 0; }
td svg { display: block; }
.charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 14px; }
figcaption { font-size: 13px; margin-bottom: 6px; }
figure svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
.grid { stroke: var(--rule); fill: none; } .axis { stroke: var(--soft); fill: none; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.band { stroke: none; opacity: .22; }
.skip { stroke: var(--warning); stroke-width: 1.6; } .bad { stroke: var(--error); stroke-width: 1.6; }
.lost { fill: var(--lost); } .subnormal { fill: var(--subnormal); } .normal { fill: var(--normal); }
.overflow { fill: var(--overflow); }
.keys { display: flex; flex-wrap: wrap; gap: 0 12px; } .keys .key { margin-left: 0; }
.key { white-space: nowrap; margin-left: 12px; }
.key::before { content: ""; display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 5px; }
.keyskip::before { background: var(--warning); } .keybad::before { background: var(--error); }
.key.lost::before { background: var(--lost); } .key.subnormal::before { background: var(--subnormal); }
.key.normal::before { background: var(--normal); } .key.overflow::before { background: var(--overflow); }
summary { cursor: pointer; }
summary h2 { display: inline-block; }
ul { margin: 6px 0; padding-left: 20px; }
li { overflow-wrap: anywhere; }
footer { margin-top: 40px; font-size: 13px; }
@media print { .card, figure { break-inside: avoid; } }
""" + "".join(
    f".line{n} {{ stroke: var(--line{n}); }} .band.line{n} {{ fill: var(--line{n}); }} "
    f".key{n}::before {{ background: var(--line{n}); }}\n"
    for n in range(6)
)
