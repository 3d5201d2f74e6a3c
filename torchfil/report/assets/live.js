"use strict";
(() => {
  // Asks for news every two seconds while the page is in view, and puts it in place of what changed.
  const byId = (id) => document.getElementById(id), EVERY = 2000, SILENT = 60000;
  const focusable = "a[href], button, summary, input, [tabindex]";
  let etag = "", behind = 0, longest = 0, verdict = null, asking = false, ended = false;

  // Folds stay open, the focus and what was scrolled sideways stay where they are.
  const replace = (old, fresh) => {
    const all = (what) => [...old.querySelectorAll(what)];
    const open = all("details").map((fold) => fold.open), moved = all(".scroll").map((box) => box.scrollLeft);
    const place = all(focusable).indexOf(document.activeElement);
    old.replaceChildren(...fresh.childNodes);
    all("details").forEach((fold, i) => { fold.open = Boolean(open[i]); });
    all(".scroll").forEach((box, i) => { box.scrollLeft = moved[i] ?? 0; });
    if (place >= 0) all(focusable)[place]?.focus({ preventScroll: true });
  };
  const swap = (fresh) => {
    const before = Number(byId("live").dataset.written), cards = (main) => [...main.querySelectorAll(":scope > [id]")];
    const main = document.querySelector("main"), next = fresh.querySelector("main"), top = scrollY;
    const [old, made] = [cards(main), cards(next)];
    document.title = fresh.title;
    byId("first").replaceChildren(...fresh.getElementById("first").childNodes);
    if (!old.length || old.map((card) => card.id).join() !== made.map((card) => card.id).join()) replace(main, next);
    else old.forEach((card, i) => { if (card.innerHTML !== made[i].innerHTML) replace(card, made[i]); });
    if (scrollY !== top) scrollTo({ top, behavior: "instant" });
    const written = Number(byId("live").dataset.written);
    if (before) longest = Math.max(longest, 1000 * (written - before));
  };

  // The time of the last update, and whether there will be more; the clock is the server's.
  const status = () => {
    const live = byId("live"), written = 1000 * Number(live.dataset.written), ago = Date.now() - behind - written;
    const time = live.querySelector("time"), stopped = written && ago > Math.max(SILENT, 4 * longest);
    if (time) time.textContent = new Date(written)[ago > 864e5 ? "toLocaleString" : "toLocaleTimeString"](undefined, { hour12: false });
    let text = written ? "Training is writing." : "";
    if (stopped) text = "Training stopped writing: it has ended, takes a break or saves rarely.";
    if (ended) text = "The watch has ended or cannot be reached; these are its last numbers.";
    byId("state").textContent = text;
    const said = document.querySelector(".stamp"), now = [said?.textContent, said?.nextElementSibling?.textContent, (stopped || ended) && text];
    const spoken = now.filter(Boolean).map((part) => part.replace(/\s+/g, " ").trim()).join(". ");
    if (verdict !== null && spoken !== verdict) byId("said").textContent = spoken;
    verdict = spoken;
  };
  const ask = async () => {
    if (asking || document.hidden) return;
    asking = true;
    try {
      const answer = await fetch(location.href, { headers: etag ? { "If-None-Match": etag } : {}, cache: "no-store", redirect: "error" });
      if (!answer.ok && answer.status !== 304) throw new Error(answer.statusText);
      const now = Date.parse(answer.headers.get("Date"));
      if (now) behind = Date.now() - now;
      if (answer.status !== 304) {
        etag = answer.headers.get("ETag");
        swap(new DOMParser().parseFromString(await answer.text(), "text/html"));
      }
      ended = false;
    } catch { ended = true; }
    asking = false;
    status();
  };
  setInterval(ask, EVERY);
  addEventListener("visibilitychange", ask);
  status();
  ask();
})();
