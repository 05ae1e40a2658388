// What the page shows now, and what people do to it.

const state = { head: page.order[0], token: null, colour: null };
const find = (id) => document.getElementById(id);
const text = new Text(find("text"));
const map = new HeadMap(find("map"), (place) => setHead(place));
let asked = 0; // of several heads asked for in a row only the last one is painted

async function paint() {
  const ticket = ++asked;
  const head = page.heads[state.head];
  const reads = await readsOf(state.head);
  if (ticket !== asked) return;
  text.paint(head, reads, state);
  find("legend").lastElementChild.replaceChildren(...legendOf(head, state.colour, isolate));
  const panel = find("panel");
  panel.hidden = false;
  if (state.token === null) panel.replaceChildren(...hint(head, reads));
  else {
    const close = button("close", clear, "×");
    close.setAttribute("aria-label", "Close");
    panel.replaceChildren(close, ...tokenPanel(state.token, head, reads, show));
  }
  panel.classList.toggle("sheet", state.token !== null);
}

// What to do first, with a token at which there is much to see.
function hint(head, reads) {
  if (!reads) return [make("p", "", "This head has less to show than others: the page has no room for its tokens.")];
  const rests = new Set(head.rests);
  const coloured = new Set(head.groups.map(({ group }) => group));
  const worth = (token) =>
    reads.targets(token).reduce((sum, target) => sum + (coloured.has(reads.group(target.token)) && !rests.has(target.token) ? target.weight : 0), 0);
  let [best, most] = [null, 0];
  for (let token = 0; token < TOKENS; token++) {
    const value = page.tokens[token].trim() === "" ? 0 : worth(token);
    if (value > most) [best, most] = [token, value];
  }
  const facts = make("p", "", `${percent(head.far)} of this head's attention goes further back than ${number(page.window)} tokens. It attends to ${percent(head.pairs)} of all pairs.`);
  if (head.rests.length) {
    const few = head.rests.slice(0, 3).map((token) => `“${shown(token)}” (token ${number(token + 1)})`);
    facts.append(` It rests on `, make("bdi", "", few.join(", ")), `, which it reads whoever asks; words and groups leave that out.`);
  }
  if (best === null) return [facts];
  const start = button("start", () => show(best), "For example ", make("bdi", "", `“${shown(best)}”`), make("span", "muted", `, token ${number(best + 1)}`));
  return [facts, make("p", "", "Click a token to see what it reads. "), start];
}

async function setHead(place) {
  [state.head, state.colour] = [place, null];
  const head = page.heads[place];
  map.mark(place);
  find("words").replaceChildren(make("b", "", title(head)), " ", make("bdi", "", head.words), ".");
  const rank = page.order.indexOf(place);
  find("before").disabled = rank === 0;
  find("after").disabled = rank === page.order.length - 1;
  await paint();
}

const step = (by) => {
  const place = page.order[page.order.indexOf(state.head) + by];
  if (place !== undefined) setHead(place);
};

function isolate(place) {
  state.colour = state.colour === place ? null : place;
  state.token = null;
  const inLegend = find("legend").contains(document.activeElement);
  return paint().then(() => inLegend && find("legend").querySelectorAll("button")[place]?.focus());
}

// Show what a token reads.
function show(token) {
  [state.token, state.colour] = [token, null];
  text.focus(token);
  return paint().then(async () => {
    const reads = await readsOf(state.head);
    const far = reads ? `${percent(reads.far(token))} of its attention is far away` : "";
    find("live").textContent = `${shown(token)}: ${far}`;
  });
}

function clear() {
  [state.token, state.colour] = [null, null];
  return paint();
}

const tokenAt = (target) => {
  const span = target.closest?.("[data-token]");
  return span ? Number(span.dataset.token) : null;
};

text.element.addEventListener("click", (event) => {
  const token = tokenAt(event.target);
  if (token === null || !getSelection().isCollapsed) return;
  if (token === state.token) clear();
  else show(token);
});

text.element.addEventListener("keydown", (event) => {
  const token = tokenAt(event.target);
  if (token === null || event.ctrlKey || event.metaKey || event.altKey) return;
  const moves = {
    ArrowLeft: () => token - 1,
    ArrowRight: () => token + 1,
    ArrowUp: () => text.vertical(token, -1),
    ArrowDown: () => text.vertical(token, 1),
    Home: () => 0,
    End: () => TOKENS - 1,
  };
  if (event.key in moves) {
    const to = Math.max(0, Math.min(TOKENS - 1, moves[event.key]()));
    if (state.token === null) text.focus(to);
    else show(to);
  } else if (event.key === "Enter" || event.key === " ") token === state.token ? clear() : show(token);
  else return;
  event.preventDefault();
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") clear();
  else if (event.key === "[") step(-1);
  else if (event.key === "]") step(1);
  else if (/^[1-8]$/.test(event.key) && Number(event.key) <= page.heads[state.head].groups.length) isolate(Number(event.key) - 1);
});

find("before").addEventListener("click", () => step(-1));
find("after").addEventListener("click", () => step(1));
find("keys").addEventListener("click", () => {
  find("help").hidden = !find("help").hidden;
  find("keys").setAttribute("aria-expanded", String(!find("help").hidden));
});

async function start() {
  if (typeof DecompressionStream === "undefined") {
    find("about").textContent = "This browser is too old for this page: it cannot unpack its data.";
    return;
  }
  const { dense, focus } = page.perplexity;
  const left = page.leftOut ? ` of ${number(TOKENS + page.leftOut)}` : "";
  const windows = page.starts.length > 1 ? ` in ${page.starts.length} windows that are read from scratch` : "";
  find("about").append(make("b", "", make("bdi", "", page.adapter)), " on ", make("bdi", "", page.text || "a text"), `, ${number(TOKENS)} tokens${left}${windows}. `);
  find("about").append(`With ${page.setting} the routed heads attend to ${percent(page.pairs)} of the pairs`);
  find("about").append(dense === null ? "." : `; perplexity here ${focus.toFixed(2)}, dense ${dense.toFixed(2)}.`);
  find("scale").append(...scaleOf());
  if (matchMedia("(max-width: 60rem)").matches) find("legend").open = false;
  await setHead(state.head);
  document.documentElement.dataset.ready = "yes";
}

start();
