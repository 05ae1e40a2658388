// The heads as a small map: layers from left to right, heads from top to bottom; darker, the further back they read.

const SHADES = [16, 32, 64, 128, 256]; // mean distance in tokens from which a square is a shade darker

class HeadMap {
  constructor(element, choose) {
    const layers = [...new Set(page.heads.map((head) => head.layer))];
    const rows = [...new Set(page.heads.map((head) => head.head ?? 0))];
    element.style.gridTemplateColumns = `repeat(${layers.length}, minmax(.625rem, 1.75rem))`;
    this.squares = page.heads.map((head, place) => {
      const shade = SHADES.filter((distance) => head.reach >= distance).length;
      const square = button(`square h${shade}${head.data === null ? " words-only" : ""}`, () => choose(place));
      square.setAttribute("role", "radio");
      square.setAttribute("aria-label", `${title(head)} ${head.words}`);
      square.title = `${title(head)} ${head.words}`;
      square.style.gridColumn = layers.indexOf(head.layer) + 1;
      square.style.gridRow = rows.indexOf(head.head ?? 0) + 1;
      return square;
    });
    element.append(...this.squares);
    for (const [place, layer] of layers.entries()) {
      if (place % 5) continue;
      const label = make("span", "layer-number", String(layer));
      label.style.gridColumn = place + 1;
      label.style.gridRow = rows.length + 1;
      label.setAttribute("aria-hidden", "true");
      element.append(label);
    }
    element.addEventListener("keydown", (event) => {
      const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [];
      if (dx === undefined) return;
      event.preventDefault();
      const { layer, head } = page.heads[this.chosen];
      const wanted = [layers[layers.indexOf(layer) + dx], rows[rows.indexOf(head ?? 0) + dy]];
      const found = page.heads.findIndex((one) => one.layer === wanted[0] && (one.head ?? 0) === wanted[1]);
      if (found >= 0) choose(found).then(() => this.squares[found].focus());
    });
  }

  mark(chosen) {
    this.chosen = chosen;
    for (const [place, square] of this.squares.entries()) {
      square.setAttribute("aria-checked", String(place === chosen));
      square.tabIndex = place === chosen ? 0 : -1;
    }
  }
}

function scaleOf() {
  const named = SHADES.map((distance, place) => [`h${place + 1}`, `${distance} +`]);
  const small = page.heads.some((head) => head.data === null) ? "Small ones are here in words only." : "";
  return [
    "Squares are heads, layers from left to right. They read on average this many tokens back: ",
    ...[["h0", `under ${SHADES[0]}`], ...named].map(([shade, text]) =>
      make("span", "step", make("i", `square ${shade}`), text),
    ),
    small,
  ];
}
