// What is on the page: tokens, sides, and their layers, unpacked when they are looked at (see focus_hf/explore/pack.py).

const page = JSON.parse(document.getElementById("data").textContent);
const TOKENS = page.tokens.length;
const windowOf = new Uint32Array(TOKENS); // for each token, its window
page.starts.forEach((start, number) => windowOf.fill(number, start));

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const unpacked = new Map();

// A layer of a side, as a promise.
function layerOf(side, layer) {
  const key = page.sides.indexOf(side) * page.layers.length + layer;
  if (!unpacked.has(key)) unpacked.set(key, inflate(side.layers[layer]).then((bytes) => planes(bytes, side.patterns[layer])));
  return unpacked.get(key);
}

function planes(bytes, pattern) {
  let next = 0;
  const plane = () => bytes.subarray(next * TOKENS, ++next * TOKENS);
  const several = (count) => Array.from({ length: count }, plane);
  const groups = several(pattern.groups);
  const reads = pattern.reads === null ? groups : several(pattern.reads); // what a token attends to
  const [confidence, near, sink, lost] = several(4);
  const targets = () => Array.from({ length: page.targets }, () => several(3));
  const far = targets();
  const gone = targets();
  const root = (byte) => (byte / 255) ** 2;
  const list = (of, token) =>
    of
      .map(([low, high, weight]) => ({ token: token - low[token] - 256 * high[token], weight: root(weight[token]) }))
      .filter((target) => target.weight > 0);
  return {
    first: groups[0],
    groups: (token) => groups.map((plane) => plane[token]),
    has: (token, group) => groups.some((plane) => plane[token] === group),
    window: pattern.window,
    denseBelow: pattern.denseBelow,
    shared: (one, other) => reads.map((plane) => plane[one]).filter((g) => groups.some((plane) => plane[other] === g)),
    second: groups[1],
    confidence: (token) => confidence[token] / 255,
    near: (token) => root(near[token]),
    sink: (token) => root(sink[token]),
    lost: (token) => root(lost[token]),
    far: (token) => list(far, token),
    gone: (token) => list(gone, token),
  };
}

// Why token i attends to token j: the definition, as focus_hf/attention/mask.py has it. Empty: it does not.
function reasons(side, view, i, j) {
  if (j > i || windowOf[i] !== windowOf[j]) return [];
  const start = page.starts[windowOf[i]];
  const found = [];
  if (i - j <= view.window) found.push("local");
  if (j - start < side.sinks) found.push("sink");
  if (i - start < view.denseBelow) found.push("dense start");
  const shared = view.shared(i, j);
  if (shared.length) found.push(`shares group ${shared.join(" and ")}`);
  return found;
}

async function lossesOf(text) {
  const bytes = await inflate(text);
  const whole = new Uint16Array(bytes.buffer, bytes.byteOffset, TOKENS);
  return Float32Array.from(whole, (value) => (value === 65535 ? NaN : value / 1000));
}

const NAMED = { " ": "␣", "\n": "⏎", "\t": "⇥" };

// A token by itself, with its spaces to be seen.
function shown(token) {
  const text = page.tokens[token];
  return text === "" ? "·" : text.replace(/[ \n\t]/g, (character) => NAMED[character]);
}

// A token's place in running text, on one line.
function around(token, before, after) {
  const start = page.starts[windowOf[token]];
  const stop = page.starts[windowOf[token] + 1] ?? TOKENS;
  const text = (from, to) => page.tokens.slice(from, to).join("").replace(/\s+/g, " ");
  return [
    text(Math.max(start, token - before), token),
    page.tokens[token].trim() === "" ? shown(token) : text(token, token + 1),
    text(token + 1, Math.min(stop, token + 1 + after)),
  ];
}

const number = (value) => value.toLocaleString("en");
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

// An element with a class and children; strings become text, never markup.
function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null));
  return element;
}
