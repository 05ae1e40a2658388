// The text: one span for each token, whose classes say its group, or what the chosen token reads.

// The spaces before a token's first character that can be seen.
const before = (text) => (text.trim() === "" ? "" : text.match(/^ */)[0]);

const WEIGHTS = [0.01, 0.03, 0.08, 0.2]; // from which a token that is read is a shade darker

class Text {
  constructor(element) {
    this.element = element;
    this.spans = page.tokens.map((_, token) => this.span(token));
    let window = -1;
    for (const [token, span] of this.spans.entries()) {
      if (windowOf[token] !== window) {
        window = windowOf[token];
        if (window > 0) element.append(make("span", "break", `window ${window + 1}, read from scratch`));
      }
      // The space before a word stays outside, so that a line does not begin or end with a bit of colour.
      element.append(before(page.tokens[token]), span);
    }
    this.spans[0].tabIndex = 0;
  }

  span(token) {
    const text = page.tokens[token];
    const span = make("span", "t", text.slice(before(text).length).replaceAll("\n", "⏎\n"));
    span.dataset.token = token;
    span.tabIndex = -1;
    return span;
  }

  // Give every token its classes.
  paint(head, reads, { token, colour }) {
    const colours = new Map(head.groups.map(({ group }, place) => [group, place]));
    const targets = new Map(reads && token !== null ? reads.targets(token).map((target) => [target.token, target]) : []);
    for (const [place, span] of this.spans.entries()) {
      const own = reads ? colours.get(reads.group(place)) : undefined;
      let name = "t";
      if (page.tokens[place].trim() === "") name += page.tokens[place] ? " blank" : " part";
      if (token === null) name += own === undefined || (colour !== null && colour !== own) ? " rest" : ` g${own}`;
      else if (place === token) name += " current";
      else if (!targets.has(place)) name += " rest";
      else if (targets.get(place).weight === 0) name += " lost";
      else name += ` w${WEIGHTS.filter((least) => targets.get(place).weight >= least).length}`;
      if (span.className !== name) span.className = name;
    }
  }

  // Move the keyboard to a token: one token at a time can be reached with Tab.
  focus(token) {
    this.element.querySelector('[tabindex="0"]').tabIndex = -1;
    this.spans[token].tabIndex = 0;
    this.spans[token].focus({ preventScroll: true });
    this.spans[token].scrollIntoView({ block: "nearest" });
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
