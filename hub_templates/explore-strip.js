// Perplexity along the text: lines for the base model and for every side, and below them how much Focus loses.

const SVG = "http://www.w3.org/2000/svg";
const BUCKETS = 64;

function draw(tag, className, attributes) {
  const element = document.createElementNS(SVG, tag);
  element.setAttribute("class", className);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// Mean losses of stretches of the text; NaN where nothing was predicted.
function stretches(losses) {
  const count = Math.max(1, Math.min(BUCKETS, Math.floor(TOKENS / 16)));
  return Array.from({ length: count }, (_, number) => {
    const first = Math.floor((number * TOKENS) / count);
    const stop = Math.floor(((number + 1) * TOKENS) / count);
    const known = losses.slice(first, stop).filter((loss) => !Number.isNaN(loss));
    return { first, stop, loss: known.length ? known.reduce((sum, loss) => sum + loss, 0) / known.length : NaN };
  });
}

function stripOf(losses, go) {
  const rows = losses.map(([name, of, perplexity]) => ({ name, perplexity, stretches: stretches(of) }));
  const dense = rows[0];
  if (dense.perplexity === null) return [];
  const known = rows.flatMap((row) => row.stretches.map((one) => one.loss)).filter((loss) => !Number.isNaN(loss));
  const low = Math.min(...known);
  const high = Math.max(...known, low + 0.1);
  const chart = draw("svg", "chart", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img" });
  const x = (one) => (500 * (one.first + one.stop)) / TOKENS;
  for (const start of page.starts.slice(1)) {
    const place = (1000 * start) / TOKENS;
    chart.append(draw("line", "start", { x1: place, x2: place, y1: 0, y2: 100 }));
  }
  chart.append(draw("line", "zero", { x1: 0, x2: 1000, y1: 84, y2: 84 }));
  const losts = rows.slice(1).map((row) => row.stretches.map((one, place) => one.loss - dense.stretches[place].loss));
  const most = Math.max(0.02, ...losts.flat().filter((lost) => !Number.isNaN(lost)).map(Math.abs));
  const width = 1000 / dense.stretches.length / (rows.length - 1);
  for (const [number, lost] of losts.entries())
    for (const [place, value] of lost.entries()) {
      if (Number.isNaN(value)) continue;
      const height = (14 * Math.abs(value)) / most;
      const left = (1000 * dense.stretches[place].first) / TOKENS + number * width;
      const top = value > 0 ? 84 - height : 84;
      chart.append(draw("rect", `bar-${number + 1}`, { x: left + 1, y: top, width: width - 2, height }));
    }
  for (const [number, row] of rows.entries()) {
    const points = row.stretches.filter((one) => !Number.isNaN(one.loss));
    const line = points.map((one) => `${x(one).toFixed(1)},${(64 - (60 * (one.loss - low)) / (high - low)).toFixed(1)}`);
    chart.append(draw("polyline", `line-${number}`, { points: line.join(" ") }));
  }
  const here = draw("line", "here", { x1: -9, x2: -9, y1: 0, y2: 100 });
  chart.append(here);
  chart.addEventListener("click", (event) => {
    const box = chart.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    go(Math.max(0, Math.min(TOKENS - 1, Math.floor(share * TOKENS))));
  });
  const told = rows.map((row) => `${row.name} ${row.perplexity.toFixed(2)}${change(row, dense)}`);
  chart.setAttribute("aria-label", `Perplexity along the text: ${told.join("; ")}`);
  const key = make("p", "key", make("b", "", "Perplexity along the text"));
  for (const [number, row] of rows.entries()) {
    const name = `${row.name} ${row.perplexity.toFixed(2)}`;
    key.append(make("span", "", make("i", `dash-${number}`), name, make("span", "muted", change(row, dense))));
  }
  const under = make("p", "muted", `Bars: what Focus loses (up) or gains (down), at most ${most.toFixed(2)} nats. `);
  const table = make("details", "", make("summary", "", "As a table"), tableOf(rows));
  return [key, chart, under, table, here];
}

function change(row, dense) {
  if (row === dense) return "";
  const percentage = 100 * (row.perplexity / dense.perplexity - 1);
  return ` (${percentage < 0 ? "−" : "+"}${Math.abs(percentage).toFixed(2)} %)`;
}

function tableOf(rows) {
  const table = make("table", "", make("thead", "", make("tr", "", make("th", "", "tokens"))));
  table.createCaption().textContent = "Perplexity by stretches of the text";
  for (const row of rows) table.tHead.rows[0].append(make("th", "", row.name));
  const body = make("tbody", "");
  const every = Math.max(1, Math.ceil(rows[0].stretches.length / 16));
  for (let place = 0; place < rows[0].stretches.length; place += every) {
    const part = (row) => row.stretches.slice(place, place + every);
    const last = part(rows[0]).at(-1).stop;
    const line = make("tr", "", make("th", "", `${number(rows[0].stretches[place].first + 1)} to ${number(last)}`));
    for (const row of rows) {
      const known = part(row).map((one) => one.loss).filter((loss) => !Number.isNaN(loss));
      const mean = known.reduce((sum, loss) => sum + loss, 0) / known.length;
      line.append(make("td", "", known.length ? Math.exp(mean).toFixed(1) : ""));
    }
    body.append(line);
  }
  table.append(body);
  return table;
}
