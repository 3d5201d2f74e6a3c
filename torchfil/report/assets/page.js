"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  // Controls and direction marks as escapes, as the rest of the page writes them.
  const visible = (text) => String(text).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (sign) => "\\u" + sign.codePointAt(0).toString(16).padStart(4, "0"));
  const element = (name, text, className, attributes = {}) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = visible(text);
    if (className) made.className = className;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const newButton = (text, className, click, attributes = {}) => {
    const made = element("button", text, className, { type: "button", ...attributes });
    made.addEventListener("click", click);
    return made;
  };

  // Paper shows everything: what is folded away opens for it, and closes again. The table of all examples stays folded.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")].filter((fold) => fold.id !== "all-examples");
    for (const fold of opened) fold.open = true;
  });
  addEventListener("afterprint", () => { for (const fold of opened) fold.open = false; });

  // An address opens what is folded away there.
  const unfold = () => {
    const target = /^#[\w-]+$/.test(location.hash) ? byId(location.hash.slice(1)) : null;
    const fold = target?.querySelector(":scope > details");
    if (fold) { fold.open = true; target.scrollIntoView(); }
  };
  addEventListener("hashchange", unfold);
  unfold();

  // The table: columns of up to some ten thousand examples; null is unknown, 1e300 infinite.
  if (!byId("spec")) return;
  const spec = JSON.parse(byId("spec").textContent), n = spec.ids.length;
  const rowHeight = 32, NOT_MEASURED = "2", LOWER_BOUND = "1", all = byId("all-examples");
  for (const column of spec.columns) if (column.key === "num_rows") column.label = spec.unit.rows;
  const columnOf = Object.fromEntries(spec.columns.map((column) => [column.key, column]));
  const shownColumns = spec.columns.filter((column) => !column.detail);

  // Numbers as the rest of the page writes them: three digits, powers of ten outside 0.001 … 99,999.
  const raised = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  const trimmed = (text, even) => (text.includes(".") && !even ? text.replace(/0+$/, "").replace(/\.$/, "") : text);
  const number = (value, even = false) => {
    if (value === null) return "unknown";
    if (Math.abs(value) >= 1e299) return value > 0 ? "∞" : "−∞";
    if (value === 0) return "0";
    const [mantissa, power] = value.toExponential(2).split("e"), exponent = Number(power);
    if (exponent >= -3 && exponent <= 4) {
      const [whole, part] = trimmed(Number(`${mantissa}e${power}`).toFixed(Math.max(2 - exponent, 0)), even).split(".");
      return (whole.replace(/\B(?=(\d{3})+$)/g, ",") + (part ? "." + part : "")).replace("-", "−");
    }
    const short = trimmed(mantissa, even).replace("-", "−"), ten = "10" + [...String(exponent)].map((c) => raised[c]).join("");
    return short === "1" ? ten : `${short} × ${ten}`;
  };

  const times = (ratio) => number(ratio < 1 ? Math.min(ratio, 0.999) : ratio, true) + "×";

  // Order: what is unknown always stands last.
  const collator = new Intl.Collator("en", { numeric: true });
  const sorted = (key, descending) => {
    const values = key === "id" ? spec.ids : columnOf[key].values, sign = descending ? -1 : 1;
    const compare = key === "id" ? collator.compare : (x, y) => x - y;
    return [...values.keys()].sort((a, b) => {
      const x = values[a], y = values[b];
      return x === null || y === null ? (x === null) - (y === null) || a - b : sign * compare(x, y) || a - b;
    });
  };

  // Rows in view are drawn into a pool of lines, which the scrolled spacer carries.
  const state = { key: "", descending: false, order: [], view: [], active: -1 };
  const spacer = byId("spacer"), rows = byId("rows"), grid = byId("grid"), head = byId("head");
  const text = (row, column) => {
    const value = column.values[row], status = spec.status[row];
    if (column.key === "ratio" && value === null) return "too few draws";
    if (status === NOT_MEASURED && (column.key === "fil" || column.key.startsWith("mse"))) return "not measured";
    if (value === null) return "";
    if (column.kind === "times") return times(value);
    if (column.kind === "rate") return `${Number((100 * value).toPrecision(3))} %`;
    const sign = status === LOWER_BOUND ? { fil: "≥ ", mse_bound: "≤ " }[column.key] || "" : "";
    return sign + (column.whole ? value.toLocaleString("en") : number(value, true));
  };
  const pool = [];
  const newLine = (i) => {
    const line = element("div", undefined, "line", { role: "row", id: "line-" + i }), role = "gridcell";
    const cells = shownColumns.map((column) => element("div", undefined, column.narrow ? "cell" : "cell extra", { role }));
    line.append(element("div", undefined, "", { role }), ...cells);
    line.addEventListener("click", () => { state.active = line.place; draw(); open(state.view[line.place]); });
    rows.append(line);
    return line;
  };
  const draw = () => {
    const first = Math.floor(grid.scrollTop / rowHeight), shown = Math.ceil(grid.clientHeight / rowHeight) + 1;
    rows.style.transform = `translateY(${first * rowHeight}px)`;
    for (let i = 0; i < Math.max(shown, pool.length); i++) {
      const line = (pool[i] ??= newLine(i)), place = first + i, row = state.view[place];
      line.hidden = i >= shown || place >= state.view.length;
      line.style.display = line.hidden ? "none" : "";
      if (line.hidden) continue;
      line.place = place;
      line.setAttribute("aria-rowindex", place + 2);
      line.setAttribute("aria-selected", String(place === state.active));
      if (place === state.active) grid.setAttribute("aria-activedescendant", line.id);
      line.children[0].textContent = line.children[0].title = visible(spec.ids[row]);
      shownColumns.forEach((column, j) => {
        const cell = line.children[j + 1];
        cell.textContent = text(row, column);
        cell.classList.toggle("none", ["not measured", "too few draws"].includes(cell.textContent));
      });
    }
  };
  const select = (place) => {
    state.active = Math.max(0, Math.min(place, state.view.length - 1));
    const top = state.active * rowHeight, bottom = top + rowHeight + head.offsetHeight - grid.clientHeight;
    grid.scrollTop = Math.max(Math.min(grid.scrollTop, top), bottom);
    draw();
  };
  grid.addEventListener("scroll", () => requestAnimationFrame(draw));
  grid.addEventListener("keydown", (event) => {
    if (!state.view.length || event.target.closest("button")) return;
    const page = Math.max(Math.floor(grid.clientHeight / rowHeight) - 1, 1), { active } = state;
    const moves = { ArrowDown: active + 1, ArrowUp: active - 1, PageDown: active + page, PageUp: active - page, Home: 0, End: Infinity };
    if (event.key in moves) { event.preventDefault(); select(moves[event.key]); }
    else if ((event.key === "Enter" || event.key === " ") && active >= 0) { event.preventDefault(); open(state.view[active]); }
  });

  // Filters: by status, by group, by a threshold on a column, by id; all of them together. An id that equals the search comes first.
  const statuses = {
    measured: (row) => spec.status[row] !== NOT_MEASURED,
    partly: (row) => spec.status[row] === LOWER_BOUND,
    unmeasured: (row) => spec.status[row] === NOT_MEASURED,
  };
  const filters = () => {
    const tests = [], status = byId("filter").value, wanted = byId("search").value.trim();
    if (status !== "all") tests.push(statuses[status] || ((row) => spec.marks[status][row] === "1"));
    if (byId("group")?.value) {
      const [place, level] = byId("group").value.split(":").map(Number);
      tests.push((row) => spec.groups[place].codes[row] === level);
    }
    const limit = parseFloat(byId("limit").value), { values } = columnOf[byId("column").value], most = byId("side").value === "most";
    if (!Number.isNaN(limit)) tests.push((row) => values[row] !== null && (most ? values[row] <= limit : values[row] >= limit));
    if (wanted) tests.push((row) => spec.ids[row].includes(wanted));
    return tests;
  };
  const refresh = () => {
    const tests = filters(), wanted = byId("search").value.trim();
    state.view = state.order.filter((row) => tests.every((test) => test(row)));
    if (wanted) state.view.sort((a, b) => (spec.ids[b] === wanted) - (spec.ids[a] === wanted));
    state.active = -1;
    grid.removeAttribute("aria-activedescendant");
    byId("clear").hidden = !tests.length;
    spacer.style.height = state.view.length * rowHeight + "px";
    grid.setAttribute("aria-rowcount", state.view.length + 1);
    const shown = state.view.length.toLocaleString("en");
    byId("found").textContent = state.view.length === n ? `${shown} ${spec.unit.many}` : `${shown} of ${n.toLocaleString("en")} ${spec.unit.many}`;
    grid.scrollTop = 0;
    draw();
  };
  const sort = (key, descending) => {
    Object.assign(state, { key, descending, order: sorted(key, descending) });
    for (const cell of head.querySelectorAll("[role=columnheader]")) {
      cell.setAttribute("aria-sort", cell.dataset.key === key ? (descending ? "descending" : "ascending") : "none");
    }
    refresh();
  };

  // What a column means: a question mark beside its heading, for the mouse and the keyboard.
  const helpText = byId("help");
  const closeHelp = () => {
    helpText.hidden = true;
    for (const button of head.querySelectorAll("[aria-expanded=true]")) button.setAttribute("aria-expanded", "false");
  };
  const help = (column) => {
    const button = newButton("?", "help", () => {
      const opens = button.getAttribute("aria-expanded") === "false";
      closeHelp();
      if (!opens) return;
      helpText.replaceChildren(element("b", column.label), `: ${column.meaning}.`);
      helpText.hidden = false;
      button.setAttribute("aria-expanded", "true");
    }, { "aria-label": `What is “${column.label}”?`, "aria-expanded": "false", "aria-controls": "help" });
    return button;
  };
  head.addEventListener("keydown", (event) => { if (event.key === "Escape") closeHelp(); });
  const buildHead = () => {
    const line = element("div", undefined, "line", { role: "row" });
    for (const column of [{ key: "id", label: spec.unit.one[0].toUpperCase() + spec.unit.one.slice(1), meaning: "the id that the run was saved with", narrow: true }, ...shownColumns]) {
      const cell = element("div", undefined, column.narrow ? "cell" : "cell extra", { role: "columnheader", "data-key": column.key });
      const first = ["fil", "epsilon"].includes(column.key) || column.kind === "rate";
      cell.append(newButton(column.label, "", () => sort(column.key, state.key === column.key ? !state.descending : first)), help(column));
      line.append(cell);
    }
    head.append(line);
    grid.style.setProperty("--columns", shownColumns.length);
    grid.style.setProperty("--narrow", shownColumns.filter((column) => column.narrow).length);
    grid.setAttribute("aria-colcount", shownColumns.length + 1);
  };

  // The details of one example.
  const dialog = byId("detail");
  const listed = (title, pairs) => {
    const table = element("table"), body = element("tbody");
    for (const [name, value] of pairs) {
      const line = element("tr");
      line.append(element("th", name, "", { scope: "row" }), element("td", value));
      body.append(line);
    }
    table.append(body);
    return pairs.length ? [element("h4", title), table] : [];
  };
  const sentence = (row) => {
    const ratio = columnOf.ratio?.values[row], rank = `Number ${spec.rank[row].toLocaleString("en")} of ${spec.measured.toLocaleString("en")} by FIL.`;
    if (spec.status[row] === NOT_MEASURED) return `Not measured: no batch drew this ${spec.unit.one}, or too rarely to tell. This run says nothing about it; it is not safe.`;
    if (ratio === null) return `${rank} It was drawn too rarely to tell how far below its estimate the truth may lie; it is not safe, only not known.`;
    const bound = columnOf.mse_bound.values[row], low = columnOf.mse_bound_low?.values[row] ?? bound;
    const off = ratio === undefined ? `a mean squared error of ${number(low)} or more per input` : `at least ${times(ratio)} a blind guess’s error`;
    const understated = spec.status[row] === LOWER_BOUND ? " Some of its steps were paused: it leaks more than shown." : "";
    return `${rank} An unbiased estimate of its inputs has ${off}, on average (${spec.origin}).${understated}`;
  };
  const copyLink = () => {
    const button = newButton("Copy link", "copy", async () => {
      try { await navigator.clipboard.writeText(location.href); button.textContent = "Copied"; }
      catch { button.textContent = "Copy it from the address bar"; }
    });
    return button;
  };
  // A person with its number of rows, "patient 2217, 12 visits"; an example by its id.
  const named = (row) => {
    const rows = columnOf.num_rows?.values[row], { one, row: each, rows: several } = spec.unit;
    const id = one === "example" ? spec.ids[row] : `${one} ${spec.ids[row]}`;
    return rows === undefined ? id : `${id}, ${rows.toLocaleString("en")} ${rows === 1 ? each : several}`;
  };
  const open = (row) => {
    const top = element("div", undefined, "top"), title = element("h3", named(row), "", { id: "detail-id" });
    top.append(title, copyLink(), newButton("Close", "close", () => dialog.close(), { autofocus: "" }));
    const values = spec.columns.map((column) => [column.label, text(row, column)]).filter(([, value]) => value !== "");
    const groups = spec.groups.map((group) => [group.name, group.levels[group.codes[row]]]);
    const attributes = spec.attributes.filter((attribute) => attribute.values[row] !== null)
      .map(({ name, unit, values: errors }) => [name, errors[row] > 1e299 ? "beyond a blind guess’s error" : `± ${number(errors[row])}${unit ? " " + unit : ""}`]);
    const attacks = spec.attacks.flatMap((attack) => attack.rows.flatMap((target, i) => (target === row
      ? [[attack.name, `error ${number(attack.achieved[i])}, bound ${number(attack.predicted[i])}`]] : [])));
    dialog.replaceChildren(top, element("p", sentence(row)),
      ...listed("Measured", values), ...listed("Groups", groups),
      ...listed("An unbiased estimate errs by at least", attributes), ...listed("Attacks", attacks));
    history.replaceState(null, "", "#example-" + encodeURIComponent(spec.ids[row]));
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
  };
  dialog.addEventListener("close", () => history.replaceState(null, "", location.pathname + location.search));
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  for (const button of document.querySelectorAll("button[data-row]")) {
    const place = Number(button.dataset.row);
    button.addEventListener("click", () => open(spec.places ? spec.places.indexOf(place) : place));
  }

  // Addresses: #example-ID opens an example, #show-exposed and the like filter the table.
  const clear = () => {
    for (const id of ["search", "limit", "group"]) if (byId(id)) byId(id).value = "";
    byId("filter").value = "all";
  };
  const follow = () => {
    const [, kind, wanted] = /^#(example|show)-(.+)$/.exec(location.hash) || [];
    if (!kind) return;
    if (kind === "show") {
      all.open = true;
      all.scrollIntoView();
      clear();
      if ([...byId("filter").options].some((option) => option.value === wanted)) byId("filter").value = wanted;
      refresh();
      grid.focus({ preventScroll: true });
      return;
    }
    let id = wanted;
    try { id = decodeURIComponent(wanted); } catch { /* an address that nobody encoded */ }
    if (spec.ids.includes(id)) open(spec.ids.indexOf(id));
    else { all.open = true; all.scrollIntoView(); byId("found").textContent = `The table has no ${spec.unit.one} of this address`; }
  };
  let waiting = 0;
  for (const id of ["search", "limit"]) byId(id).addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(refresh, 120); });
  for (const id of ["filter", "group", "column", "side"]) byId(id)?.addEventListener("change", refresh);
  byId("clear").addEventListener("click", () => { clear(); refresh(); byId("search").focus(); });
  addEventListener("hashchange", follow);
  for (const link of document.querySelectorAll('a[href^="#show-"]')) {
    link.addEventListener("click", () => { if (link.hash === location.hash) follow(); });
  }
  addEventListener("resize", draw);
  all.addEventListener("toggle", draw);
  buildHead();
  sort(columnOf.ratio ? "ratio" : "mse_bound", false);
  for (const tool of document.querySelectorAll(".tools :disabled")) tool.disabled = false;
  grid.dataset.ready = "true";
  follow();
})();
