"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  // Controls and direction marks as escapes, as the rest of the page writes them.
  const visible = (text) => String(text).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (sign) => "\\u" + sign.codePointAt(0).toString(16).padStart(4, "0"));
  const element = (name, text, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = visible(text);
    if (className) made.className = className;
    return made;
  };

  // Light and dark: the system's choice until the button is used.
  const theme = byId("theme"), root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const showTheme = () => {
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-pressed", String(isDark()));
    theme.setAttribute("aria-label", isDark() ? "Switch to light colours" : "Switch to dark colours");
  };
  theme.hidden = false;
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; showTheme(); });
  system.addEventListener("change", showTheme);
  showTheme();

  // The contents: open beside the page, folded above it; the chapter in view is marked.
  const contents = byId("contents"), roomy = matchMedia("(min-width: 62rem)"), entries = new Map();
  const fold = () => { contents.open = roomy.matches; };
  for (const link of contents.querySelectorAll("a")) entries.set(link.hash.slice(1), link);
  contents.addEventListener("click", (event) => { if (event.target.closest("a")) fold(); });
  roomy.addEventListener("change", fold);
  fold();
  const inView = new IntersectionObserver((changes) => {
    for (const change of changes) {
      if (change.isIntersecting) entries.get(change.target.id)?.setAttribute("aria-current", "true");
      else entries.get(change.target.id)?.removeAttribute("aria-current");
    }
  }, { rootMargin: "-25% 0px -74% 0px" });
  for (const section of document.querySelectorAll("main > section")) inView.observe(section);

  if (!byId("spec")) return;
  const spec = JSON.parse(byId("spec").textContent), n = spec.rows;
  const rowHeight = 32, tallest = 8e6, NOT_MEASURED = 2, LOWER_BOUND = 1;
  const data = {};
  let idStarts = null, allIds = "";

  // Numbers as the rest of the page writes them: three digits, powers of ten outside 0.001 … 99,999.
  const raised = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  const trimmed = (text, even) => (text.includes(".") && !even ? text.replace(/0+$/, "").replace(/\.$/, "") : text);
  const number = (value, even = false) => {
    if (Number.isNaN(value)) return "unknown";
    if (!Number.isFinite(value) || Math.abs(value) >= 1e299) return value > 0 ? "∞" : "−∞";
    if (value === 0) return "0";
    const [mantissa, power] = value.toExponential(2).split("e"), exponent = Number(power);
    if (exponent >= -3 && exponent <= 4) {
      const [whole, part] = trimmed(Number(`${mantissa}e${power}`).toFixed(Math.max(2 - exponent, 0)), even).split(".");
      return (whole.replace(/\B(?=(\d{3})+$)/g, ",") + (part ? "." + part : "")).replace("-", "−");
    }
    const short = trimmed(mantissa, even).replace("-", "−"), ten = "10" + [...String(exponent)].map((c) => raised[c]).join("");
    return short === "1" ? ten : `${short} × ${ten}`;
  };

  // From base64 to typed arrays: gzip, then bytes of one significance back to numbers.
  const bytesOf = async (name) => {
    const node = byId("data-" + name), text = atob(node.textContent), packed = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
    node.remove();
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  };
  const types = { Uint8: Uint8Array, Uint16: Uint16Array, Uint32: Uint32Array, Float32: Float32Array, Float64: Float64Array };
  const unpack = async (name) => {
    const planes = await bytesOf(name), type = types[spec.blocks[name]], size = type.BYTES_PER_ELEMENT;
    if (size === 1) return planes;
    const length = planes.length / size, mixed = new Uint8Array(planes.length);
    for (let b = 0; b < size; b++) for (let i = 0, from = b * length; i < length; i++) mixed[i * size + b] = planes[from + i];
    return new type(mixed.buffer);
  };
  const read = async () => {
    for (const name of Object.keys(spec.blocks)) {
      if (spec.blocks[name] === "text") allIds = new TextDecoder().decode(await bytesOf(name));
      else data[name] = await unpack(name);
    }
    if (spec.ids === "text") {
      idStarts = new Uint32Array(n + 1);
      for (let i = 0; i < n; i++) idStarts[i + 1] = idStarts[i] + data.lengths[i];
    }
    for (const column of spec.columns) if (column.from_fil) data[column.key] = Float64Array.from(data.fil, (v) => 1 / (v * v));
  };
  const idOf = (row) => (spec.ids === "text" ? allIds.slice(idStarts[row], idStarts[row + 1]) : String(spec.ids === "rows" ? row : data.ids[row]));

  // Order: keys and rows in one number each, so that the browser's own sort of numbers does it; NaN always last.
  const sortedBy = (values, descending) => {
    const order = new Uint32Array(n);
    if (n > 2 ** 20) {
      for (let i = 0; i < n; i++) order[i] = i;
      const sign = descending ? -1 : 1;
      return order.sort((a, b) => {
        const x = values[a], y = values[b];
        return Number.isNaN(x) || Number.isNaN(y) ? Number.isNaN(x) - Number.isNaN(y) || a - b : sign * (x - y) || a - b;
      });
    }
    const floats = Float32Array.from(values), bits = new Uint32Array(floats.buffer), keys = new Float64Array(n);
    for (let i = 0; i < n; i++) {
      let key = bits[i] >>> 31 ? ~bits[i] >>> 0 : (bits[i] | 0x80000000) >>> 0;
      if (descending) key = ~key >>> 0;
      if (Number.isNaN(floats[i])) key = 0xffffffff;
      keys[i] = key * 1048576 + i;
    }
    keys.sort();
    for (let i = 0; i < n; i++) order[i] = keys[i] % 1048576;
    return order;
  };
  // Texts letter by letter from the last to the first (radix sort); a comparison each where ids are long.
  const sortTexts = (order) => {
    let longest = 0;
    for (let i = 0; i < n; i++) longest = Math.max(longest, idStarts[i + 1] - idStarts[i]);
    if (longest > 64) {
      const names = Array.from({ length: n }, (_, i) => idOf(i));
      order.sort((a, b) => (names[a] < names[b] ? -1 : names[a] > names[b] ? 1 : a - b));
      return;
    }
    const letter = (row, at) => (idStarts[row] + at < idStarts[row + 1] ? allIds.charCodeAt(idStarts[row] + at) + 1 : 0);
    let from = order, to = new Uint32Array(n);
    for (let at = longest - 1; at >= 0; at--) {
      const places = new Uint32Array(65538);
      for (let i = 0; i < n; i++) places[letter(from[i], at) + 1]++;
      if (places[letter(from[0], at) + 1] === n) continue;
      for (let i = 1; i < places.length; i++) places[i] += places[i - 1];
      for (let i = 0; i < n; i++) to[places[letter(from[i], at)]++] = from[i];
      [from, to] = [to, from];
    }
    if (from !== order) order.set(from);
  };
  const sortedById = (descending) => {
    const order = new Uint32Array(n);
    for (let i = 0; i < n; i++) order[i] = i;
    if (spec.ids === "rows") return descending ? order.reverse() : order;
    if (spec.ids === "numbers") order.sort((a, b) => data.ids[a] - data.ids[b]);
    else sortTexts(order);
    return descending ? order.reverse() : order;
  };

  // Search: rows whose id holds the text; an id that equals it comes first.
  const rowAt = (place) => {
    let low = 0, high = n;
    while (high - low > 1) { const middle = (low + high) >> 1; if (idStarts[middle] <= place) low = middle; else high = middle; }
    return low;
  };
  const matching = (text) => {
    const hit = new Uint8Array(n);
    if (spec.ids === "text") {
      for (let at = allIds.indexOf(text); at >= 0; at = allIds.indexOf(text, at + 1)) {
        const row = rowAt(at), end = at + text.length;
        if (end <= idStarts[row + 1]) hit[row] = Math.max(hit[row], at === idStarts[row] && end === idStarts[row + 1] ? 2 : 1);
      }
    } else for (let row = 0; row < n; row++) { const id = idOf(row); if (id.includes(text)) hit[row] = id === text ? 2 : 1; }
    return hit;
  };

  const state = { key: "mse_bound", descending: false, order: null, view: null, active: -1, position: 0, scroll: 0 };
  const viewport = byId("viewport"), spacer = byId("spacer"), rows = byId("rows"), grid = byId("grid"), head = byId("head");
  const virtualHeight = () => state.view.length * rowHeight;
  const spacerHeight = () => Math.min(virtualHeight(), tallest);
  const stretch = () => {
    const free = spacerHeight() - viewport.clientHeight;
    return free > 0 ? (virtualHeight() - viewport.clientHeight) / free : 1;
  };

  const shownColumns = spec.columns.filter((column) => !column.detail);
  const cells = (row, columns = shownColumns) => columns.map((column) => {
    if (data.status[row] === NOT_MEASURED && (column.key === "fil" || column.key.startsWith("mse"))) return ["not measured", "none"];
    const value = data[column.key][row];
    if (Number.isNaN(value)) return ["", ""];
    return [(data.status[row] === LOWER_BOUND ? { fil: "≥ ", mse_bound: "≤ " }[column.key] || "" : "") + (column.whole ? value.toLocaleString("en") : number(value, true)), ""];
  });
  const pool = [];
  const draw = () => {
    const first = Math.floor(state.position / rowHeight), shown = Math.ceil(viewport.clientHeight / rowHeight) + 1;
    rows.style.transform = `translateY(${first * rowHeight - state.position}px)`;
    for (let i = 0; i < Math.max(shown, pool.length); i++) {
      let line = pool[i];
      if (!line) {
        line = pool[i] = element("div", undefined, "line");
        line.setAttribute("role", "row");
        line.id = "line-" + i;
        line.append(element("div"), ...shownColumns.map((column) => element("div", undefined, column.narrow ? "cell" : "cell extra")));
        for (const cell of line.children) cell.setAttribute("role", "gridcell");
        line.addEventListener("click", () => { state.active = line.place; draw(); open(state.view[line.place]); });
        rows.append(line);
      }
      const place = first + i, row = state.view[place];
      line.hidden = i >= shown || place >= state.view.length;
      line.style.display = line.hidden ? "none" : "";
      if (line.hidden) continue;
      line.place = place;
      line.setAttribute("aria-rowindex", place + 2);
      line.setAttribute("aria-selected", String(place === state.active));
      if (line.row !== row) {
        line.row = row;
        line.children[0].textContent = line.children[0].title = visible(idOf(row));
        cells(row).forEach(([text, kind], j) => {
          const cell = line.children[j + 1];
          cell.textContent = visible(text);
          cell.classList.toggle("none", kind === "none");
        });
      }
      if (place === state.active) grid.setAttribute("aria-activedescendant", line.id);
    }
  };
  const goTo = (position) => {
    state.position = Math.max(0, Math.min(position, virtualHeight() - viewport.clientHeight));
    viewport.scrollTop = state.position / stretch();
    state.scroll = viewport.scrollTop;
    draw();
  };
  const select = (place) => {
    state.active = Math.max(0, Math.min(place, state.view.length - 1));
    const top = state.active * rowHeight;
    if (top < state.position) goTo(top);
    else if (top + rowHeight > state.position + viewport.clientHeight) goTo(top + rowHeight - viewport.clientHeight);
    else draw();
  };
  viewport.addEventListener("scroll", () => {
    if (Math.abs(viewport.scrollTop - state.scroll) < 1) return;
    state.scroll = viewport.scrollTop;
    state.position = Math.min(state.scroll * stretch(), Math.max(virtualHeight() - viewport.clientHeight, 0));
    requestAnimationFrame(draw);
  });
  viewport.addEventListener("wheel", (event) => {
    if (!state.view || stretch() <= 1.001 || event.ctrlKey) return; // a stretched table scrolls row by row all the same
    const end = virtualHeight() - viewport.clientHeight;
    if ((event.deltaY < 0 && state.position <= 0) || (event.deltaY > 0 && state.position >= end)) return;
    event.preventDefault();
    goTo(state.position + event.deltaY * (event.deltaMode === 1 ? rowHeight : 1));
  }, { passive: false });
  viewport.addEventListener("focus", () => grid.focus({ preventScroll: true }));
  grid.addEventListener("keydown", (event) => {
    if (!state.view || !state.view.length || event.target.closest("button")) return;
    const page = Math.max(Math.floor(viewport.clientHeight / rowHeight) - 1, 1), last = state.view.length - 1;
    const moves = { ArrowDown: state.active + 1, ArrowUp: state.active < 0 ? 0 : state.active - 1, PageDown: state.active + page, PageUp: state.active - page, Home: 0, End: last };
    if (event.key in moves) { event.preventDefault(); select(moves[event.key]); }
    else if ((event.key === "Enter" || event.key === " ") && state.active >= 0) { event.preventDefault(); open(state.view[state.active]); }
  });

  // Filters: by status, by group, by a threshold on a column; all of them together.
  const statuses = {
    measured: (row) => data.status[row] !== NOT_MEASURED,
    partly: (row) => data.status[row] === LOWER_BOUND,
    unmeasured: (row) => data.status[row] === NOT_MEASURED,
  };
  const filters = () => {
    const tests = [], [place, level] = byId("group") ? byId("group").value.split(":").map(Number) : [NaN];
    const status = byId("filter").value, marked = data["is-" + status];
    if (status !== "all") tests.push(statuses[status] || ((row) => marked[row] === 1));
    if (!Number.isNaN(place) && byId("group").value) {
      const codes = data[spec.groups[place].data];
      tests.push((row) => codes[row] === level);
    }
    const limit = parseFloat(byId("limit").value), values = data[byId("column").value], most = byId("side").value === "most";
    if (!Number.isNaN(limit)) tests.push((row) => (most ? values[row] <= limit : values[row] >= limit));
    return tests;
  };
  const refresh = () => {
    const text = byId("search").value.trim(), hits = text ? matching(text) : null, tests = filters();
    if (hits) tests.push((row) => hits[row]);
    byId("clear").hidden = !tests.length;
    if (!tests.length) state.view = state.order;
    else {
      state.view = state.order.filter((row) => tests.every((test) => test(row)));
      if (hits) {
        const equal = state.view.filter((row) => hits[row] === 2), others = state.view.filter((row) => hits[row] !== 2);
        state.view.set(equal);
        state.view.set(others, equal.length);
      }
    }
    state.active = -1;
    grid.removeAttribute("aria-activedescendant");
    spacer.style.height = spacerHeight() + "px";
    grid.setAttribute("aria-rowcount", state.view.length + 1);
    const shown = state.view.length.toLocaleString("en");
    byId("found").textContent = state.view.length === n ? `${shown} examples` : `${shown} of ${n.toLocaleString("en")} examples`;
    for (const line of pool) line.row = undefined;
    goTo(0);
  };
  const sort = (key, descending) => {
    state.key = key;
    state.descending = descending;
    state.order = key === "id" ? sortedById(descending) : sortedBy(data[key], descending);
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
    const button = element("button", "?", "help");
    button.type = "button";
    button.setAttribute("aria-label", `What is “${column.label}”?`);
    button.setAttribute("aria-expanded", "false");
    button.setAttribute("aria-controls", "help");
    button.addEventListener("click", () => {
      const opens = button.getAttribute("aria-expanded") === "false";
      closeHelp();
      if (!opens) return;
      helpText.replaceChildren(element("b", column.label), `: ${column.meaning}.`);
      helpText.hidden = false;
      button.setAttribute("aria-expanded", "true");
    });
    return button;
  };
  head.addEventListener("keydown", (event) => { if (event.key === "Escape") closeHelp(); });
  const buildHead = () => {
    const line = element("div", undefined, "line");
    line.setAttribute("role", "row");
    for (const column of [{ key: "id", label: "Example", meaning: "the id that the run was saved with", narrow: true }, ...shownColumns]) {
      const cell = element("div", undefined, column.narrow ? "cell" : "cell extra"), button = element("button", column.label);
      cell.setAttribute("role", "columnheader");
      cell.dataset.key = column.key;
      button.type = "button";
      button.addEventListener("click", () => sort(column.key, state.key === column.key ? !state.descending : column.key === "fil" || column.key === "epsilon"));
      cell.append(button, help(column));
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
      const line = element("tr"), heading = element("th", name);
      heading.scope = "row";
      line.append(heading, element("td", value));
      body.append(line);
    }
    table.append(body);
    return pairs.length ? [element("h4", title), table] : [];
  };
  const sentence = (row) => {
    const fil = data.fil[row];
    if (data.status[row] === NOT_MEASURED) return "Not measured: no batch drew this example, or its steps were left out. This run says nothing about it; it is not safe.";
    let above = 0, known = 0;
    for (let i = 0; i < n; i++) if (data.status[i] !== NOT_MEASURED) { known++; if (data.fil[i] > fil) above++; }
    if (spec.of) known = spec.of.measured;
    const bound = data.mse_bound ? data.mse_bound[row] : 1 / fil ** 2;
    const low = data.mse_bound_low ? data.mse_bound_low[row] : NaN;
    const untold = Number.isNaN(low) || (low === 0 && bound > 0);
    const end = untold ? ", which does not tell how far below the truth may lie" : `; the lower end of the 95 % interval is ${number(low)}`;
    const off = `${spec.exact ? "" : "an estimated "}${number(bound)} or more per input on average (${spec.origin}${spec.exact ? "" : end})`;
    const understated = data.status[row] === LOWER_BOUND ? " Some of its steps were not measured: it leaks more than shown." : "";
    const rank = !spec.of || above < spec.of.ranked ? `Number ${(above + 1).toLocaleString("en")} of ${known.toLocaleString("en")} by exposure. ` : "";
    return `${rank}An unbiased guess of its inputs has a mean squared error of ${off}.${understated}`;
  };
  const open = async (row) => {
    await ready;
    const top = element("div", undefined, "top"), title = element("h3", idOf(row)), close = element("button", "Close", "close");
    title.id = "detail-id";
    close.type = "button";
    close.autofocus = true;
    close.addEventListener("click", () => dialog.close());
    top.append(title, copyLink(), close);
    const pictures = element("div", undefined, "pictures");
    pictures.append(...[...document.querySelectorAll(`.card[data-row="${spec.of ? data.places[row] : row}"] img`)].map((image) => image.cloneNode()));
    const values = cells(row, spec.columns).map(([text], j) => [spec.columns[j].label, text]).filter(([, text]) => text !== "");
    const groups = spec.groups.map((group) => [group.name, group.levels[data[group.data][row]]]);
    const attributes = spec.attributes.map((attribute) => [attribute.name, data[attribute.data][row], attribute.unit])
      .filter(([, value]) => !Number.isNaN(value)).map(([name, value, unit]) => [name, `± ${number(value)}${unit ? " " + unit : ""}`]);
    const attacks = spec.attacks.flatMap((attack) => attack.rows.flatMap((target, i) => (target === row
      ? [[attack.name, `error ${number(attack.achieved[i])}, bound ${number(attack.predicted[i])}`]] : [])));
    dialog.replaceChildren(top, element("span", "Confidential", "kept"), ...(pictures.childElementCount ? [pictures] : []), element("p", sentence(row)),
      ...listed("Measured", values), ...listed("Groups", groups), ...listed(`An unbiased guess is off by ${spec.lower_ends ? "at least" : "an estimated"}, on average`, attributes), ...listed("Attacks", attacks));
    history.replaceState(null, "", "#example-" + encodeURIComponent(idOf(row)));
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
  };
  dialog.addEventListener("close", () => history.replaceState(null, "", location.pathname + location.search));

  // Addresses: #example-ID opens an example, #show-exposed and the like filter the table.
  const copyLink = () => {
    const button = element("button", "Copy link", "copy");
    button.type = "button";
    button.addEventListener("click", async () => {
      try { await navigator.clipboard.writeText(location.href); button.textContent = "Copied"; }
      catch { button.textContent = "Copy it from the address bar"; }
    });
    return button;
  };
  const rowOf = (id) => {
    if (spec.ids === "text") return matching(id).indexOf(2);
    return spec.ids === "numbers" ? data.ids.indexOf(Number(id)) : /^\d+$/.test(id) && Number(id) < n ? Number(id) : -1;
  };
  const follow = () => {
    const [, kind, wanted] = /^#(example|show)-(.+)$/.exec(location.hash) || [];
    if (kind === "show") {
      clear();
      if ([...byId("filter").options].some((option) => option.value === wanted)) byId("filter").value = wanted;
      refresh();
      byId("examples").scrollIntoView({ behavior: "instant" });
    } else if (kind === "example") {
      let id = wanted;
      try { id = decodeURIComponent(wanted); } catch { /* an address that nobody encoded */ }
      const row = rowOf(id);
      byId("examples").scrollIntoView({ behavior: "instant" });
      if (row >= 0) open(row);
      else byId("found").textContent = "The table has no example of this address";
    }
  };
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  for (const button of document.querySelectorAll("button[data-row]")) button.addEventListener("click", () => ready.then(() => open(spec.of ? data.places.indexOf(Number(button.dataset.row)) : Number(button.dataset.row))));

  let waiting = 0;
  byId("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(refresh, 120); });
  byId("limit").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(refresh, 120); });
  for (const id of ["filter", "group", "column", "side"]) byId(id)?.addEventListener("change", refresh);
  const clear = () => {
    for (const id of ["search", "limit", "group"]) if (byId(id)) byId(id).value = "";
    byId("filter").value = "all";
  };
  byId("clear").addEventListener("click", () => { clear(); refresh(); byId("search").focus(); });
  addEventListener("hashchange", () => ready.then(follow));
  addEventListener("resize", () => { if (state.view) goTo(state.position); });

  const ready = read().then(() => {
    buildHead();
    const first = spec.columns.find((column) => column.key === "mse_bound") || spec.columns[0];
    sort(first ? first.key : "id", false);
    for (const tool of document.querySelectorAll(".tools :disabled")) tool.disabled = false;
    grid.dataset.ready = "true";
    follow();
  }).catch((error) => {
    byId("found").textContent = `The table could not be read by this browser (${error.message}); the files beside this page hold it.`;
    console.error(error);
  });
})();
