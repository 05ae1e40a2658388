// What is on the page: tokens and heads, unpacked when they are looked at (see focus_hf/explore/pack.py).

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

// What tokens of a head read, as a promise; null for a head of which the page has words only.
function readsOf(number) {
  if (page.heads[number].data === null) return Promise.resolve(null);
  if (!unpacked.has(number)) unpacked.set(number, inflate(page.heads[number].data).then(planes));
  return unpacked.get(number);
}

function planes(bytes) {
  let next = 0;
  const plane = () => bytes.subarray(next * TOKENS, ++next * TOKENS);
  const root = (byte) => (byte / 255) ** 2;
  const [groups, far, lost] = [plane(), plane(), plane()];
  const targets = Array.from({ length: page.targets }, () => [plane(), plane(), plane(), plane()]);
  return {
    group: (token) => groups[token],
    far: (token) => root(far[token]),
    lost: (token) => root(lost[token]),
    targets: (token) =>
      targets
        .map(([low, high, weight, dense]) => ({
          token: token - low[token] - 256 * high[token],
          weight: root(weight[token]),
          dense: root(dense[token]),
        }))
        .filter((target) => target.weight > 0 || target.dense > 0),
  };
}

// In which band of distance a far token is.
const bandOf = (distance) => page.bandStarts.findLastIndex((start, band) => band === 0 || distance > start);

const NAMED = { " ": "␣", "\n": "⏎", "\t": "⇥" };

// A token by itself; one that is nothing but space as signs.
function shown(token) {
  const text = page.tokens[token];
  if (text === "") return "·";
  return text.trim() || text.replace(/[ \n\t]/g, (character) => NAMED[character]);
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
const title = (head) => `Layer ${head.layer}${head.head === null ? "" : `, head ${head.head}`}`;

// An element with a class and children; strings become text, never markup.
function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null));
  return element;
}

function button(className, press, ...children) {
  const element = make("button", className, ...children);
  element.type = "button";
  element.addEventListener("click", press);
  return element;
}
