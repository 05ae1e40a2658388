// What one token reads, and the groups of a head.

function badge(head, group) {
  const place = head.groups.findIndex((one) => one.group === group);
  return make("i", `badge ${place < 0 ? "grey" : `g${place}`}`);
}

const nameOf = (head, group) => head.groups.find((one) => one.group === group)?.name ?? "another group";

function tokenPanel(token, head, reads, jump) {
  const window = windowOf[token];
  const place = `token ${number(token + 1)} of ${number(TOKENS)}`;
  const inWindow =
    page.starts.length > 1 ? `, ${number(token - page.starts[window] + 1)} of window ${window + 1}` : "";
  const whole = page.tokens[token] === "" ? ", a part of the character before it" : "";
  const parts = [make("h2", "token", make("bdi", "", shown(token))), make("p", "muted", place + inWindow + whole)];
  if (!reads) return [...parts, make("p", "", "The page has no tokens of this head.")];
  const own = head.groups.find(({ group }) => group === reads.group(token));
  parts.push(make("p", "muted", ...(own ? ["Its group: ", badge(head, own.group), make("bdi", "", own.name)] : ["Its group is one of the grey ones."])));
  const targets = reads.targets(token);
  const read = targets.filter((target) => target.weight > 0);
  const lost = targets.filter((target) => target.weight === 0);
  const near = `the last ${number(page.window)} tokens or the first ones`;
  parts.push(
    make("p", "", `${percent(reads.far(token))} of its attention is far away, the rest on ${near}.`),
    ...cellsOf(token, head, reads, read).map((cell) => cellPart(token, cell, head, jump)),
  );
  const more = reads.far(token) - read.reduce((sum, target) => sum + target.weight, 0);
  if (more >= 0.005) parts.push(make("p", "muted", `${percent(more)} more is on other far tokens.`));
  if (lost.length)
    parts.push(
      make("h3", "", `Not read: ${percent(reads.lost(token))} of what dense attention would`),
      targetList(token, lost, "lost", jump),
    );
  else parts.push(make("p", "muted", `Dense attention would pay ${percent(reads.lost(token))} to tokens that it does not read.`));
  return parts;
}

// Tokens that are read, by group and distance, those with most weight first.
function cellsOf(token, head, reads, targets) {
  const cells = new Map();
  for (const target of targets) {
    const [group, band] = [reads.group(target.token), bandOf(token - target.token)];
    const key = `${group} ${band}`;
    if (!cells.has(key)) cells.set(key, { group, band, weight: 0, targets: [] });
    cells.get(key).targets.push(target);
    cells.get(key).weight += target.weight;
  }
  return [...cells.values()].sort((one, two) => two.weight - one.weight);
}

function cellPart(token, { group, band, weight, targets }, head, jump) {
  return make(
    "section",
    "cell",
    make("h3", "", badge(head, group), make("bdi", "", nameOf(head, group)), make("span", "muted", ` ${page.bands[band]} · ${percent(weight)}`)),
    targetList(token, targets, "read", jump),
  );
}

function targetList(token, targets, className, jump) {
  const list = make("ul", `targets ${className}`);
  for (const target of targets) {
    const [before, itself, after] = around(target.token, 5, 5);
    const weights = [target.weight ? `reads ${percent(target.weight)}` : null, `dense ${target.dense ? percent(target.dense) : "under 0.5 %"}`];
    const facts = [`${number(token - target.token)} back`, ...weights.filter((text) => text !== null)].join(" · ");
    const context = make("span", "context", make("bdi", "", before, make("b", "", itself), after));
    list.append(make("li", "", button("", () => jump(target.token), context, make("span", "muted", facts))));
  }
  return list;
}

// The groups that matter, by name and size; pressing one shows only its tokens.
function legendOf(head, chosen, choose) {
  const list = make("ul", "legend");
  for (const [place, group] of head.groups.entries()) {
    const facts = `${percent(group.size)} of the tokens, ${percent(group.weight)} of what is read far away, ${group.distance}`;
    const typical = group.tokens.map((text) => make("bdi", "", text));
    const entry = button("", () => choose(place), badge(head, group.group), make("bdi", "label", group.name), make("span", "muted", facts), make("span", "typical", ...typical));
    entry.setAttribute("aria-pressed", String(chosen === place));
    list.append(make("li", "", entry));
  }
  const size = head.groups.reduce((sum, group) => sum + group.size, 0);
  const rest = head.groups.length ? `All other groups, ${percent(1 - size)} of the tokens, are grey.` : "No group is read more than its size would make it.";
  return [list, make("p", "muted", rest)];
}
