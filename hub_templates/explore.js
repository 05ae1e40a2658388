// What the page shows now, and what people do to it.

const state = { layer: 0, token: null, kept: false, colour: null, numbers: false };
const find = (id) => document.getElementById(id);
const panes = page.sides.map((side, number) => new Pane(side, number));
let losses = [];
let here = null; // the place of the token in the strip
let asked = 0; // of several layers asked for in a row only the last one is painted

async function paint() {
  const ticket = ++asked;
  const views = await Promise.all(page.sides.map((side) => layerOf(side, state.layer)));
  if (ticket !== asked) return;
  const kept = state.kept ? state.token : null;
  panes.forEach((pane, number) => pane.paint(state.layer, views[number], { ...state, kept }));
  mark();
}

function mark() {
  const { token } = state;
  for (const pane of panes) pane.mark(token);
  if (here) {
    const place = token === null ? -9 : (1000 * (token + 0.5)) / TOKENS;
    here.setAttribute("x1", place);
    here.setAttribute("x2", place);
  }
  const panel = find("panel");
  panel.hidden = token === null;
  if (token === null) return;
  const close = make("button", "close", "×");
  close.type = "button";
  close.setAttribute("aria-label", "Close");
  close.addEventListener("click", clear);
  panel.replaceChildren(close, ...tokenPanel(token, state.layer, panes, losses, (to) => go(to)));
}

function legend() {
  const heads = panes.map((pane, number) => (page.sides.length > 1 ? `${"AB"[number]}: ${pane.side.name}` : null));
  // Two top_k of one adapter have the same groups.
  const of = page.sides.length > 1 && page.sides[1].overlaps.length ? panes : panes.slice(0, 1);
  const parts = of.map(({ side, view }, number) =>
    make("div", "", ...legendOf(side, state.layer, view, of.length > 1 ? heads[number] : null, state.colour, isolate)),
  );
  const source = page.sides[0].notes.length ? "Labels and shares are from the adapter's report." : "Shares on this page.";
  find("legend").lastElementChild.replaceChildren(...parts, make("p", "muted", source));
}

async function setLayer(layer) {
  state.layer = Math.max(0, Math.min(page.layers.length - 1, layer));
  find("layer").value = state.layer;
  const name = page.layers[state.layer];
  find("layer").setAttribute("aria-valuetext", `${state.layer}, ${name}`);
  find("layer-name").replaceChildren(make("b", "", String(state.layer)), make("span", "muted", ` ${name}`));
  await paint();
  legend();
}

async function isolate(colour) {
  state.colour = colour;
  await paint();
  const focused = document.activeElement?.dataset?.colour;
  legend();
  if (focused !== undefined) document.querySelector(`#legend [data-colour="${focused}"]`)?.focus();
}

function look(token) {
  state.token = token;
  mark();
}

function keep(token, isKept) {
  state.token = token;
  state.kept = isKept;
  say(token);
  return paint();
}

function clear() {
  [state.token, state.kept, state.colour] = [null, false, null];
  paint().then(legend);
}

function say(token) {
  const said = panes.map(({ side, view }) => {
    const group = view.first[token];
    const label = groupLabel(side, state.layer, group);
    return `group ${group}${label ? ` ${label}` : ""}, ${percent(view.confidence(token))} sure`;
  });
  find("live").textContent = `${shown(token)}: ${said.join("; ")}`;
}

// Move the keyboard to a token: one token at a time can be reached with Tab.
function go(token, pane = panes.find((one) => one.text.contains(document.activeElement)) ?? panes[0]) {
  for (const one of panes) one.text.querySelectorAll('[tabindex="0"]').forEach((span) => (span.tabIndex = -1));
  for (const one of panes) one.spans[token].tabIndex = 0;
  pane.spans[token].focus({ preventScroll: true });
  for (const one of panes) one.spans[token].scrollIntoView({ block: "nearest" });
  if (state.kept) keep(token, true);
  else look(token);
  say(token);
}

const tokenAt = (target) => {
  const span = target.closest?.("[data-token]");
  return span ? Number(span.dataset.token) : null;
};

function listen(pane) {
  pane.text.addEventListener("pointerover", (event) => {
    const token = tokenAt(event.target);
    if (token !== null && event.pointerType === "mouse" && !state.kept && token !== state.token) look(token);
  });
  pane.text.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "mouse" || state.kept) return;
    const token = tokenAt(document.activeElement);
    look(token);
  });
  pane.text.addEventListener("click", (event) => {
    const token = tokenAt(event.target);
    if (token === null || !getSelection().isCollapsed) return;
    const isKept = !(state.kept && state.token === token);
    state.kept = false;
    go(token, pane);
    keep(token, isKept);
  });
  pane.text.addEventListener("keydown", (event) => {
    const token = tokenAt(event.target);
    if (token === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = {
      ArrowLeft: () => token - 1,
      ArrowRight: () => token + 1,
      ArrowUp: () => pane.vertical(token, -1),
      ArrowDown: () => pane.vertical(token, 1),
      Home: () => 0,
      End: () => TOKENS - 1,
    };
    if (event.key in moves) go(Math.max(0, Math.min(TOKENS - 1, moves[event.key]())), pane);
    else if (event.key === "Enter" || event.key === " ") keep(token, !(state.kept && state.token === token));
    else return;
    event.preventDefault();
  });
  // Texts that scroll by themselves (on a phone) scroll together.
  pane.text.addEventListener("scroll", () => {
    for (const other of panes)
      if (other !== pane && other.text.scrollTop !== pane.text.scrollTop) other.text.scrollTop = pane.text.scrollTop;
  });
}

function toggleNumbers() {
  state.numbers = !state.numbers;
  find("numbers").setAttribute("aria-pressed", String(state.numbers));
  paint();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") clear();
  else if (event.key === "[") setLayer(state.layer - 1);
  else if (event.key === "]") setLayer(state.layer + 1);
  else if (event.key === "n") toggleNumbers();
  else if (/^[0-9]$/.test(event.key) && Number(event.key) < page.sides[0].groups)
    isolate(state.colour === Number(event.key) ? null : Number(event.key));
});

find("layer").max = page.layers.length - 1;
find("layer").addEventListener("input", (event) => setLayer(Number(event.target.value)));
find("numbers").addEventListener("click", toggleNumbers);
find("keys").addEventListener("click", () => {
  find("help").hidden = !find("help").hidden;
  find("keys").setAttribute("aria-expanded", String(!find("help").hidden));
});

async function start() {
  if (typeof DecompressionStream === "undefined") {
    find("about").textContent = "This browser is too old for this page: it cannot unpack its data.";
    return;
  }
  const left = page.leftOut ? `, the first of ${number(TOKENS + page.leftOut)}` : "";
  const windows = page.starts.length > 1 ? `, in ${page.starts.length} windows that are read from scratch` : "";
  const what = page.sides.map((side) => side.name).join(" and ");
  find("about").append(make("b", "", what), " on ", make("bdi", "", page.text || "a text"));
  find("about").append(`: ${number(TOKENS)} tokens${left}${windows}.`);
  for (const pane of panes) {
    find("texts").append(pane.element);
    pane.spans[0].tabIndex = 0;
    listen(pane);
  }
  if (matchMedia("(max-width: 60rem)").matches) find("legend").open = false;
  await setLayer(Math.floor(page.layers.length / 2));
  document.documentElement.dataset.ready = "yes";
  const all = [["dense", page.dense], ...page.sides.map((side) => [side.name, side])];
  losses = await Promise.all(
    all.map(async ([name, of]) => [name, await lossesOf(of.losses), of.perplexity]),
  );
  const parts = stripOf(losses, (token) => go(token));
  here = parts.pop() ?? null;
  find("strip").append(...parts);
}

start();
