// What is known about one token, and about the groups of a layer.

function badge(side, layer, group) {
  const colour = side.colours[layer][group];
  const ring = colour >= PALETTE ? ` r${Math.floor(colour / PALETTE) % 4}` : "";
  return make("span", `badge g${colour % PALETTE}${ring}`, String(group));
}

function groupLabel(side, layer, group) {
  const label = side.notes[layer]?.[group]?.label;
  return label && label !== "mixed" ? label : null;
}

function tokenPanel(token, layer, panes, losses, jump) {
  const window = windowOf[token];
  const place = `token ${number(token + 1)} of ${number(TOKENS)}`;
  const inWindow =
    page.starts.length > 1 ? `, ${number(token - page.starts[window] + 1)} of window ${window + 1}` : "";
  const parts = [
    make("h2", "token", make("bdi", "", shown(token))),
    make("p", "muted", place + inWindow, page.tokens[token] === "" ? ", a part of the character before it" : ""),
  ];
  for (const [which, pane] of panes.entries()) parts.push(sidePart(token, layer, pane, panes.length > 1 ? which : null, jump));
  parts.push(lossPart(token, losses));
  return parts;
}

function sidePart(token, layer, { side, view }, which, jump) {
  const groups = view.groups(token);
  const names = groups.map((group) => make("span", "group", badge(side, layer, group), groupLabel(side, layer, group)));
  const part = make(
    "section",
    "of-side",
    which === null ? null : make("h3", "", make("b", "letter", "AB"[which]), " ", side.name),
    make("p", "groups", groups.length > 1 ? "Groups " : "Group ", ...names),
    make("p", "muted", `${percent(view.confidence(token))} sure of group ${groups[0]}`),
    attentionBar(token, side, view),
  );
  const why = (target) => reasons(side, view, token, target.token).join(", ");
  const far = view.far(token);
  if (far.length) part.append(make("h4", "", "Far away it attends to"), targetList(token, far, why, "far", jump));
  const gone = view.gone(token);
  if (gone.length)
    part.append(
      make("h4", "", `No longer: ${percent(view.lost(token))} of the base model's attention`),
      targetList(token, gone, () => "shares no group", "gone", jump),
    );
  return part;
}

function attentionBar(token, side, view) {
  const near = view.near(token);
  const sink = view.sink(token);
  const shares = [
    [`within ${view.window} tokens`, near, "near"],
    ["sinks", sink, "sink"],
    ["shared group", Math.max(0, 1 - near - sink), "shared"],
  ].filter(([, share], place) => place === 0 || share >= 0.0005);
  const bar = make("div", "mass");
  bar.setAttribute("aria-hidden", "true");
  const list = make("ul", "masses");
  for (const [name, share, className] of shares) {
    const piece = make("i", className);
    piece.style.flexGrow = share;
    bar.append(piece);
    list.append(make("li", "", make("i", className), `${name} ${percent(share)}`));
  }
  return make("div", "", bar, list);
}

function targetList(token, targets, why, className, jump) {
  const list = make("ul", `targets ${className}`);
  for (const target of targets) {
    const [before, itself, after] = around(target.token, 5, 5);
    const facts = `${number(token - target.token)} back · ${percent(target.weight)} · ${why(target)}`;
    const button = make(
      "button",
      "",
      make("span", "context", make("bdi", "", before, make("b", "", itself), after)),
      make("span", "muted", facts),
    );
    button.type = "button";
    button.addEventListener("click", () => jump(target.token));
    list.append(make("li", "", button));
  }
  return list;
}

function lossPart(token, losses) {
  const values = losses.map(([name, of]) => [name, of[token]]).filter(([, loss]) => !Number.isNaN(loss));
  if (!values.length) return make("p", "muted", "The first token of a window is not predicted.");
  const told = values.map(([name, loss]) => `${name} ${loss.toFixed(2)}`).join(", ");
  return make("p", "muted", `Surprise in nats: ${told}`);
}

// Groups of a layer: number, label, share, typical tokens. Pressing one shows only its tokens.
function legendOf(side, layer, view, heading, chosen, choose) {
  const counts = new Array(side.groups).fill(0);
  for (const group of view.first) counts[group]++;
  const notes = side.notes[layer];
  const order = [...counts.keys()].sort((one, two) => side.colours[layer][one] - side.colours[layer][two]);
  const list = make("ul", "legend");
  for (const group of order) {
    const colour = side.colours[layer][group];
    const here = counts[group] / TOKENS;
    const typical = notes ? notes[group].tokens : frequent(view, group);
    const shares = notes ? `${percent(notes[group].share)}, here ${percent(here)}` : percent(here);
    const overlap = side.overlaps[layer]?.[group];
    const button = make(
      "button",
      "",
      badge(side, layer, group),
      make("span", "label", notes ? notes[group].label : `group ${group}`),
      make("span", "share", shares),
      overlap === undefined ? null : make("span", "match", matched(colour, overlap)),
      make("span", "typical", ...typical.map((text) => make("bdi", "", text))),
    );
    button.type = "button";
    button.dataset.colour = colour;
    button.setAttribute("aria-pressed", String(chosen === colour));
    button.addEventListener("click", () => choose(chosen === colour ? null : colour));
    list.append(make("li", "", button));
  }
  return [heading ? make("h3", "", heading) : null, list].filter(Boolean);
}

function matched(colour, overlap) {
  if (overlap < 0) return "new: no counterpart in A";
  return overlap < 0.5 ? `new: ${percent(overlap)} overlap with ${colour} of A` : `is ${colour} of A, overlap ${percent(overlap)}`;
}

// Without a report: the group's most frequent tokens on this page.
function frequent(view, group) {
  const counts = new Map();
  for (let token = 0; token < TOKENS; token++)
    if (view.first[token] === group && page.tokens[token].trim() !== "")
      counts.set(shown(token), (counts.get(shown(token)) ?? 0) + 1);
  return [...counts].sort((one, two) => two[1] - one[1]).slice(0, 6).map(([text]) => text);
}
