"""How the page of a race looks: its colours in a light and a dark scheme, and the rest of its style sheet.

Red is kept for the race, or for the failures of a run, and green for orders that exist. Both are also told by words and
by the form of the line.
"""

LIGHT = {
    "page": "#fbfbfa",
    "surface": "#ffffff",
    "ink": "#1b1f24",
    "muted": "#59626d",
    "line": "#d9dde2",
    "bar": "#eef1f5",
    "edge": "#c3cbd5",
    "order": "#0b6a5b",
    "race": "#b5121b",
    "tint": "#fdeeee",
    "on-race": "#ffffff",
    "help": "#eef7f4",
}
"""Name of a colour -> its value in the light scheme."""

DARK = {
    "page": "#14171b",
    "surface": "#1b1f25",
    "ink": "#e8ebef",
    "muted": "#a4aeba",
    "line": "#333a43",
    "bar": "#262c35",
    "edge": "#465260",
    "order": "#5fcab5",
    "race": "#ff8c87",
    "tint": "#391d20",
    "on-race": "#2b0b0d",
    "help": "#182a28",
}
"""The same for the dark scheme."""


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


# `rem` everywhere, so that the picture grows with the reader's letters. `--from` and `--to` of an arrow are half the
# height of the rows at its ends, which is why rows have fixed heights.
_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:1rem/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
code,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.9em}
.wrap{max-width:88rem;margin:0 auto;padding:1.25rem .875rem 3rem}
h1{font-size:clamp(1.3rem,1rem + 1.3vw,1.75rem);line-height:1.25;letter-spacing:-.012em;margin:.3rem 0 0;
max-width:58rem;text-wrap:balance}
h2{font-size:1.05rem;line-height:1.3;margin:0 0 .65rem}
p{margin:0}
.kind{color:var(--race);font-weight:650;font-size:.875rem;margin:0}
.about{display:grid;grid-template-columns:max-content 1fr;gap:.15rem .9rem;margin:0;font-size:.875rem;
color:var(--muted)}
.about dd{margin:0;color:var(--ink)}
.body{display:grid;gap:2rem;margin-top:1.5rem;grid-template-columns:minmax(0,1fr)}
.words{display:grid;gap:1.6rem;align-content:start}
.pair{list-style:none;margin:0;padding:0}
.access{border:2px solid var(--race);border-radius:.6rem;background:var(--tint);padding:.7rem .9rem .8rem}
.access p+p{margin-top:.2rem}
.access .at{font-size:.875rem;color:var(--muted)}
.what{font-size:1.02rem}
.tag{display:inline-block;background:var(--race);color:var(--on-race);font:700 .6875rem/1.5 system-ui,sans-serif;
letter-spacing:.045em;text-transform:uppercase;border-radius:.25rem;padding:0 .4em;white-space:nowrap}
.unordered{color:var(--race);font-weight:650;font-size:.875rem;line-height:1.3;margin:0 0 0 1.6rem;
padding:.75rem 0 .75rem .9rem;border-left:3px dashed var(--race);position:relative}
.unordered::after{content:"";position:absolute;left:-.5rem;bottom:-1px;width:.8125rem;height:.7rem;
background:var(--race);clip-path:polygon(0 0,100% 0,50% 100%);forced-color-adjust:none}
.remedy{background:var(--help);border-left:3px solid var(--order);border-radius:.2rem .6rem .6rem .2rem;
padding:.8rem 1rem .9rem}
.remedy h2{color:var(--order);margin-bottom:.25rem}
.missing-words h2{margin-bottom:.25rem}
.note{font-size:.875rem;color:var(--muted)}
.vh{position:absolute;width:1px;height:1px;margin:-1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.skip{position:absolute;left:-999rem}
.skip:focus{position:static;display:inline-block;margin-bottom:.5rem}
a{color:inherit;text-underline-offset:.18em}
:focus-visible{outline:3px solid var(--order);outline-offset:2px;border-radius:.3rem}
figure{margin:0}
.scroll{overflow-x:auto;background:var(--surface);border:1px solid var(--line);border-radius:.75rem}
.picture{padding:0 .5rem 1rem;container:picture/inline-size}
.grid{position:relative;display:grid;list-style:none;margin:0;padding:0;min-width:var(--least);
grid-template-columns:0 var(--lanes);--row:2.5rem;--tall:5.25rem;--both:3.4rem}
.grid.tall{--tall:6.25rem}
.grid ol,.grid ol li:not([class]){display:contents}
.grid ol{list-style:none}
.lane{grid-row:1;text-align:center;padding:.7rem .2rem .55rem;font-weight:650;font-size:.875rem;line-height:1.25;
background:var(--surface);position:sticky;top:0;z-index:4;border-bottom:1px solid var(--line)}
.lane small{display:block;font-weight:400;font-size:.75rem;color:var(--muted)}
.cover{grid-row:1;grid-column:1/-1;background:var(--surface);border-bottom:1px solid var(--line);position:sticky;top:0;
z-index:3;align-self:stretch}
.life{justify-self:center;width:0;border-left:1px solid var(--line);z-index:0}
.number{display:none;grid-column:1;color:var(--muted);font-size:.6875rem;align-self:center;padding-right:.5rem;
text-align:right;white-space:nowrap}
.step{grid-column:1/-1;display:flex;align-items:center;gap:.6rem;font-size:.75rem;font-weight:650;
color:var(--muted);height:1.6rem}
.step span{background:var(--surface);z-index:3;padding-right:.2rem}
.step::after{content:"";flex:1;border-top:1px solid var(--line)}
.gap{grid-column:1/-1;font-size:.8125rem;color:var(--muted);display:flex;justify-content:center;
padding:.45rem 0;margin:.35rem 0;border-top:1px dotted var(--edge);border-bottom:1px dotted var(--edge)}
.gap span{background:var(--surface);padding:0 .6rem;z-index:3}
.event{display:flex;align-items:center;height:var(--high);z-index:2;min-width:0;--high:var(--row);
container:event/inline-size}
.event.launched{--high:var(--both)}
.event.access-row{--high:var(--tall)}
.bar{all:unset;box-sizing:border-box;cursor:pointer;display:flex;align-items:center;gap:.4em;width:100%;min-width:0;
height:calc(var(--high) - .35rem);padding:0 .3rem;font:500 .75rem/1.2 ui-monospace,
SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
color:var(--ink);background:var(--bar);border:1px solid var(--edge);border-radius:.35rem}
.bar:focus-visible{outline:3px solid var(--order);outline-offset:2px}
.bar:hover{border-color:var(--muted)}
.name{overflow:hidden;text-overflow:ellipsis;min-width:0;display:-webkit-box;-webkit-box-orient:vertical;
-webkit-line-clamp:2}
.where{display:none;flex:0 1000000 auto;flex-flow:row-reverse wrap;margin-left:auto;height:1.2em;overflow:hidden;
min-width:var(--line,0);white-space:nowrap;font-size:.6875rem;font-weight:400;color:var(--muted)}
.bar.work .where{display:flex}
.where .file{display:none;flex:1 1 3em;min-width:0;max-width:max-content;overflow:hidden;text-overflow:ellipsis}
.where .at{flex:none;order:-1}
.launch{overflow:hidden;text-overflow:ellipsis;white-space:nowrap;font-size:.6875rem;font-weight:400}
.less{display:none}
.pre{display:none;font-size:.6875rem;font-weight:400;color:var(--muted);white-space:nowrap}
.bar.mark{background:none;border:0;padding:0;gap:.25rem;color:var(--order)}
.bar.mark::before,.bar.mark::after{content:"";flex:1 1 .4rem;min-width:.4rem;border-top:2px solid var(--order)}
.bar.mark .name{flex:0 1 auto;font-size:.6875rem}
.gem{flex:none;width:.5rem;height:.5rem;transform:rotate(45deg);border:2px solid var(--order);background:var(--order);
forced-color-adjust:none}
.wait .gem{background:none}
.bar.work{flex-direction:column;align-items:stretch;justify-content:center;gap:.1rem}
.bar .line{display:flex;align-items:center;gap:.45em;min-width:0}
.bar.work .line{flex-wrap:wrap;gap:0 .3em;max-height:2.4em;overflow:hidden}
.bar.race{flex-direction:column;align-items:stretch;justify-content:center;gap:.2rem;height:calc(var(--high) - .25rem);
border:2px solid var(--race);
background:var(--tint);padding:0 .4rem}
.bar.race .line{flex-wrap:wrap;gap:.2em .45em}
.bar.race .name{font-weight:700}
.bar.race .does{font:500 .75rem/1.2 system-ui,sans-serif;color:var(--race);overflow:hidden;text-overflow:ellipsis;
white-space:nowrap}
.does i{display:none;font-style:normal}
.ghost{z-index:3;align-self:center;background:var(--surface);border:2px dashed var(--race);border-radius:.35rem;
color:var(--race);font-size:.75rem;line-height:1.35;padding:.3rem .5rem;margin:.3rem 0}
.ghost b{display:block}
.ghost span{display:none;color:var(--ink)}
.arrow{position:relative;pointer-events:none;z-index:1;margin-top:var(--from);margin-bottom:var(--to);
border:0 solid var(--order);border-top-width:2px}
.arrow.right{margin-right:var(--stub);border-right-width:2px;border-top-right-radius:.4rem}
.arrow.left{margin-left:var(--stub);border-left-width:2px;border-top-left-radius:.4rem}
.arrow.back{margin-right:var(--stub);border-right-width:2px;border-radius:0 .4rem .4rem 0}
.arrow .stub{position:absolute;bottom:0;border-bottom:2px solid var(--order);width:calc(var(--stub) + 2px)}
.arrow.right .stub{left:100%}
.arrow.left .stub{right:100%}
.arrow.missing.back .stub,.arrow.back .stub{right:0;width:100%}
.arrow .stub::after{content:"";position:absolute;bottom:-.375rem;width:.5rem;height:.625rem;background:var(--order);
forced-color-adjust:none}
.arrow.right .stub::after{right:0;clip-path:polygon(0 0,100% 50%,0 100%)}
.arrow.left .stub::after,.arrow.back .stub::after{left:0;clip-path:polygon(100% 0,0 50%,100% 100%)}
.arrow.missing{z-index:2;border-color:var(--race);border-style:dashed;border-top-width:3px}
.arrow.missing.right,.arrow.missing.back{border-right-width:3px}
.arrow.missing.left{border-left-width:3px}
.arrow.missing .stub{border-bottom:3px dashed var(--race);width:calc(var(--stub) + 3px)}
.arrow.missing .stub::after{bottom:-.5rem;width:.6875rem;height:.875rem;background:var(--race)}
.legend{display:flex;flex-wrap:wrap;gap:.35rem 1.25rem;list-style:none;margin:.75rem 0 0;padding:0;font-size:.8125rem;
color:var(--muted)}
.legend+.note{margin-top:.4rem}
.legend li{display:flex;align-items:center;gap:.5rem}
.key{flex:none;width:1.9rem;border-top:2px solid var(--order)}
.key.none{border-top:3px dashed var(--race)}
.legend .gem{margin:0 .2rem}
.sheet{margin:0;inset:auto 0 0 0;width:100%;max-width:none;max-height:70vh;overflow:auto;color:var(--ink);
background:var(--surface);border:1px solid var(--edge);border-radius:.9rem .9rem 0 0;padding:1rem 1rem 1.25rem;
box-shadow:0 0 2.5rem #0005}
.sheet h3{font-size:1rem;margin:0 2.5rem .5rem 0}
.sheet dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem .9rem;margin:0 0 .6rem;font-size:.875rem}
.sheet dt{color:var(--muted)}
.sheet dd{margin:0}
.close{position:absolute;top:.7rem;right:.7rem;min-width:2.25rem;min-height:2.25rem;font:inherit;font-size:.8125rem;
color:var(--ink);background:var(--bar);border:1px solid var(--edge);border-radius:.4rem;cursor:pointer}
@supports not selector(:popover-open){.sheet{display:none}}
.all{margin-top:2.5rem}
table{overflow-wrap:break-word;border-collapse:collapse;width:100%;font-size:.8125rem;line-height:1.4}
caption{text-align:left;padding:.7rem .8rem;color:var(--muted);font-size:.8125rem}
th,td{text-align:left;vertical-align:top;padding:.4rem .8rem;border-top:1px solid var(--line);min-width:3rem}
thead th{color:var(--muted);font-weight:600;white-space:nowrap}
tbody th{font-weight:400;color:var(--muted);white-space:nowrap}
td.long{min-width:16rem;overflow-wrap:anywhere}
tr.race>*{background:var(--tint)}
tr.race th{color:var(--ink)}
tr:target>*{background:var(--help)}
footer{margin-top:2.5rem;padding-top:1rem;border-top:1px solid var(--line);font-size:.8125rem;color:var(--muted);
max-width:60rem}
@media (min-width:40em){
.wrap{padding:2rem 2rem 4rem}
.picture{padding:0 1.25rem 1.25rem}
.sheet{inset:auto 1.5rem 1.5rem auto;width:30rem;border-radius:.75rem}
}
@media (min-width:70em){
.body.few{grid-template-columns:minmax(18rem,23rem) minmax(0,1fr);gap:2.5rem}
.body.many .words{grid-template-columns:1fr 1fr;grid-template-rows:auto auto 1fr;gap:1.6rem 2.75rem}
.body.many .words>:first-child{grid-row:span 3}
}
@media print{.sheet,.skip{display:none}.scroll{overflow:visible}}
"""


# Where a lane is wide enough for a name on one line, with its source beside it.
_WIDE = """
.grid{grid-template-columns:var(--numbers) var(--lanes);min-width:calc(var(--least) + var(--numbers));--row:2rem;
--tall:3.4rem;--both:2.75rem}
.grid.tall{--tall:4.4rem}
.number{display:block}
.where{display:flex}
.where .file{display:block}
.told{display:none}
.bar{padding:0 .4rem}
.bar wbr{display:none}
.name{white-space:nowrap;display:block}
.pre,.does i{display:inline}
.bar.mark .name{font-size:.75rem}
.bar.race .line,.bar.work .line{flex-wrap:nowrap;gap:.45em;max-height:none}
.ghost span{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:3;overflow:hidden}
@container event (min-width:11.5rem){
.bar{padding:0 .55rem;font-size:.8125rem;gap:.5em}
.bar.mark{gap:.4rem}
.less,.told{display:inline}
}
"""


def style_sheet(wide: float, fits: int) -> str:
    """The page's style sheet.

    Args:
        wide: width of the picture, in rem, from which its lanes have room for a name on one line.
        fits: width of the page, in em, from which the picture needs no scrolling of its own. From there on the names of
            the lanes stay in sight while the page scrolls.
    """
    return (
        f":root{{color-scheme:light dark;{_variables(LIGHT)}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
        f"{_RULES}"
        f"@container picture (min-width:{wide:.1f}rem){{{_WIDE}}}\n"
        f"@media (min-width:{fits}em){{.picture{{overflow:visible}}}}\n"
    )
