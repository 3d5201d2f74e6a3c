"""What holds for every page on every screen: nothing is cut off or covered, the keyboard suffices, print shows all.

Every check returns faults as readable lines; no line is good news. Tests and ``docs/pictures.py`` run the same ones.
"""

from __future__ import annotations

from typing import Any

from tests.report.in_browser import press, visible

MOST_STOPS = 600
_NAME = """
const nameOf = (e) => e.tagName.toLowerCase() + (e.id ? "#" + e.id : "") +
  (typeof e.className === "string" && e.className ? "." + e.className.trim().replace(/\\s+/g, ".") : "") +
  " “" + (e.textContent || "").trim().replace(/\\s+/g, " ").slice(0, 40) + "”";
"""


def too_wide(browser: Any) -> list[str]:
    """What makes the page scroll sideways."""
    script = """
      const edge = document.documentElement.clientWidth, out = [];
      if (document.documentElement.scrollWidth <= edge) return out;
      const scrolls = (e) => { for (let a = e.parentElement; a && a !== document.body; a = a.parentElement)
        if (getComputedStyle(a).overflowX !== "visible") return true; return false; };
      for (const e of document.body.querySelectorAll("*"))
        if (e.getBoundingClientRect().right > edge + 1 && !scrolls(e)) out.push(nameOf(e));
      return out.length ? out.slice(0, 8) : ["the page itself"];
    """
    return [f"wider than the screen: {name}" for name in browser.execute_script(_NAME + script)]


def outside_cards(browser: Any) -> list[str]:
    """Headings, numbers and texts that leave the card that they belong to, unless it scrolls."""
    script = r"""
      const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
      const out = [], range = document.createRange();
      const framed = (e) => {
        const style = getComputedStyle(e), ink = style.backgroundColor;
        return e.matches("section, article, header, li, .card") &&
          (parseFloat(style.borderLeftWidth) > 0 || !/^rgba\(.*, 0\)$/.test(ink));
      };
      while (walker.nextNode()) {
        const e = walker.currentNode.parentElement;
        let card = e;
        while (card && !framed(card)) card = card.parentElement;
        if (!card || !walker.currentNode.data.trim() || !e.checkVisibility({visibilityProperty: true})) continue;
        let scrolls = false;
        for (let a = e; a && a !== card; a = a.parentElement)
          scrolls ||= a instanceof HTMLElement && getComputedStyle(a).overflowX !== "visible";
        if (scrolls) continue;
        range.selectNodeContents(walker.currentNode);
        const own = card.getBoundingClientRect();
        for (const box of range.getClientRects())
          if (box.width > 1 && box.height > 1 && (box.left < own.left - 1 || box.right > own.right + 1 ||
              box.top < own.top - 3 || box.bottom > own.bottom + 3)) { out.push(nameOf(e)); break; }
      }
      return out.slice(0, 8);
    """
    return [f"outside its card: {name}" for name in browser.execute_script(_NAME + script)]


def overlapping(browser: Any) -> list[str]:
    """Texts of different boxes that are printed over each other."""
    height = browser.execute_script("return document.documentElement.scrollHeight")
    texts = sorted(visible(browser, height, covered=True), key=lambda each: each.box[1])
    faults = []
    for place, one in enumerate(texts):
        for other in texts[place + 1 :]:
            if other.box[1] > one.box[3] - 4:
                break
            across = min(one.box[2], other.box[2]) - max(one.box[0], other.box[0])
            down = min(one.box[3], other.box[3]) - other.box[1]
            if one.row != other.row and across > 1 and down > 4:
                faults.append(f"printed over each other: “{one.text[:40]}” and “{other.text[:40]}”")
    return faults[:8]


def keyboard(browser: Any) -> list[str]:
    """What the Tab key does not reach, stops without a visible focus, and what only a mouse can use."""
    browser.execute_script("document.activeElement.blur(); window.scrollTo(0, 0); window.stops = []")
    seen = """
      const e = document.activeElement;
      if (!e || e === document.body || window.stops.includes(e)) return null;
      window.stops.push(e);
      const style = getComputedStyle(e), box = e.getBoundingClientRect();
      const ring = (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1) || style.boxShadow !== "none";
      const inside = box.bottom > 0 && box.top < innerHeight;
      return (ring ? "" : "focus is not visible at ") + (inside ? "" : "focus is off the screen at ") + nameOf(e);
    """
    faults = []
    for _ in range(MOST_STOPS):
        press(browser, "Tab")
        stop = browser.execute_script(_NAME + seen)
        if stop is None:
            break
        faults += [stop] * stop.startswith("focus")
    rest = """
      const open = (e) => e.checkVisibility({visibilityProperty: true, contentVisibilityAuto: true}) && !e.disabled;
      const usable = "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex]";
      const missed = [...document.querySelectorAll(usable)].filter((e) => open(e) && e.tabIndex >= 0 &&
        !window.stops.includes(e) && !(e.type === "radio" && !e.checked));
      const mouse = [...document.body.querySelectorAll("*")].filter((e) => open(e) &&
        getComputedStyle(e).cursor === "pointer" && !e.closest(usable) && !e.closest("label"));
      return [...missed.map((e) => "Tab does not reach " + nameOf(e)),
        ...mouse.map((e) => "only for a mouse: " + nameOf(e))];
    """
    return (faults + browser.execute_script(_NAME + rest))[:12]


def folds(browser: Any) -> list[str]:
    """Details that Enter does not open and close again."""
    count = browser.execute_script("return document.querySelectorAll('details').length")
    faults = []
    for place in range(count):
        focus = "const d = document.querySelectorAll('details')[arguments[0]], s = d.querySelector('summary');"
        shown = browser.execute_script(
            f"{focus} if (!s.checkVisibility()) return null; s.focus(); return d.open", place
        )
        if shown is None:
            continue
        for expected in (not shown, shown):
            press(browser, "Enter")
            if browser.execute_script(f"{focus} return d.open", place) != expected:
                faults.append(
                    browser.execute_script(f"{_NAME}{focus} return 'Enter does not open ' + nameOf(s)", place)
                )
                break
    return faults


def not_printed(browser: Any) -> list[str]:
    """What is folded away on paper, apart from the table of all examples; asked with print media, as if printing."""
    script = """
      window.dispatchEvent(new Event("beforeprint"));
      const out = [];
      for (const d of document.querySelectorAll("details")) {
        if (d.querySelector("#grid") || d.closest("#grid, dialog") || getComputedStyle(d).display === "none") continue;
        const inside = [...d.children].filter((e) => e.tagName !== "SUMMARY");
        const open = (e) => e.checkVisibility({visibilityProperty: true, contentVisibilityAuto: true}) &&
          e.getBoundingClientRect().height > 0;
        if (inside.length && !inside.some(open)) out.push(nameOf(d));
      }
      window.dispatchEvent(new Event("afterprint"));
      return out.slice(0, 8);
    """
    return [f"not printed: {name}" for name in browser.execute_script(_NAME + script)]


def layout(browser: Any) -> list[str]:
    """What is cut off or covered on this screen."""
    return [*too_wide(browser), *outside_cards(browser), *overlapping(browser)]
