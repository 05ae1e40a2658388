// The text, once for every side: one span for each token, whose classes say its colour and its part in what is shown.

const PALETTE = 8; // colours; groups beyond repeat them with another underline

// The spaces before a token's first character that can be seen.
const before = (text) => (text.trim() === "" ? "" : text.match(/^ */)[0]);

class Pane {
  constructor(side, number) {
    this.side = side;
    this.spans = page.tokens.map((_, token) => this.span(token));
    this.text = make("div", "text");
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", `Text, ${side.name}`);
    let window = -1;
    for (const [token, span] of this.spans.entries()) {
      if (windowOf[token] !== window) {
        window = windowOf[token];
        if (window > 0) this.text.append(make("span", "break", `window ${window + 1}, read from scratch`));
      }
      // The space before a word stays outside, so that a line does not begin or end with a bit of colour.
      this.text.append(before(page.tokens[token]), span);
    }
    const heading = make("h2", "", page.sides.length > 1 ? make("b", "letter", "AB"[number]) : "", " ", side.name);
    this.fact = make("p", "fact");
    this.element = make("section", "pane", make("div", "head", heading, this.fact), this.text);
    this.marked = [];
  }

  span(token) {
    const text = page.tokens[token];
    const span = document.createElement("span");
    span.textContent = text.slice(before(text).length).replaceAll("\n", "⏎\n");
    span.dataset.token = token;
    span.tabIndex = -1;
    return span;
  }

  // Give every token its classes: a layer's groups; pale where not to be looked at.
  paint(layer, view, { kept, colour, numbers }) {
    this.view = view;
    const colours = this.side.colours[layer];
    const isIn = (token) => view.groups(token).some((group) => colours[group] === colour);
    const isOff = (token) =>
      (colour !== null && !isIn(token)) ||
      (kept !== null && kept !== token && reasons(this.side, view, kept, token).length === 0);
    this.marked = [];
    for (const [token, span] of this.spans.entries()) {
      const group = colours[view.first[token]];
      let name = `t g${group % PALETTE}`;
      if (group >= PALETTE) name += ` r${Math.floor(group / PALETTE) % 4}`;
      if (view.second) name += ` s${colours[view.second[token]] % PALETTE}`;
      if (view.confidence(token) < 0.5) name += " unsure";
      if (page.tokens[token].trim() === "") name += page.tokens[token] ? " blank" : " part";
      if ((kept !== null || colour !== null) && isOff(token)) name += " off";
      if (span.className !== name) span.className = name;
      if (numbers) span.dataset.groups = view.groups(token).join(" ");
    }
    this.text.classList.toggle("numbered", numbers);
    this.fact.textContent = `${percent(this.side.pairs[layer])} of the pairs in this layer`;
  }

  // Frame a token and those that matter to it.
  mark(token) {
    for (const [span, name] of this.marked) span.classList.remove(name);
    this.marked = [];
    if (token === null) return;
    const add = (where, name) => {
      this.spans[where].classList.add(name);
      this.marked.push([this.spans[where], name]);
    };
    add(token, "current");
    for (const target of this.view.far(token)) add(target.token, "far");
    for (const target of this.view.gone(token)) add(target.token, "gone");
  }

  // The token in the next line up or down that is nearest to this one.
  vertical(token, step) {
    const from = this.spans[token].getBoundingClientRect();
    let best = token;
    let nearest = Infinity;
    let line = null;
    for (let other = token + step; other >= 0 && other < TOKENS; other += step) {
      const box = this.spans[other].getClientRects()[0] ?? this.spans[other].getBoundingClientRect();
      if (line === null && (step > 0 ? box.top > from.top + 4 : box.top < from.top - 4)) line = box.top;
      if (line === null) continue;
      if (Math.abs(box.top - line) > 4) break;
      const gap = Math.abs(box.left - from.left);
      if (gap < nearest) [nearest, best] = [gap, other];
    }
    return best;
  }
}
