"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const root = document.documentElement;

  // Every text of the run becomes a text node here, never markup.
  const make = (tag, style, ...children) => {
    const element = document.createElement(tag);
    if (style) element.className = style;
    element.append(...children.filter((child) => child !== null && child !== ""));
    return element;
  };
  const seconds = (s) => (s === 0 ? "0 s" : s >= 60 ? `${Math.floor(s / 60)} m ${String(Math.floor(s % 60)).padStart(2, "0")} s` : `${s.toFixed(s < 10 ? 2 : 1)} s`);

  // ---- light and dark
  byId("theme").onclick = () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    drawBars();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawBars());

  // ---- values under the pointer
  for (const chart of document.querySelectorAll("[data-hover]")) {
    const told = JSON.parse(chart.dataset.hover);
    const svg = chart.querySelector("svg");
    const xs = [...new Set(told.series.flatMap((s) => Object.keys(s.at)))].map(Number).sort((a, b) => a - b);
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
    cursor.setAttribute("class", "cursor");
    const tip = make("div", "tip");
    svg.onpointermove = (event) => {
      const box = svg.getBoundingClientRect();
      const scale = box.width / svg.viewBox.baseVal.width;
      const share = ((event.clientX - box.left) / scale - told.left) / (told.right - told.left);
      const wanted = told.low + share * (told.high - told.low);
      const x = xs.reduce((best, at) => (Math.abs(at - wanted) < Math.abs(best - wanted) ? at : best), xs[0]);
      const pixel = told.left + ((x - told.low) / (told.high - told.low || 1)) * (told.right - told.left);
      cursor.setAttribute("d", `M${pixel},8V${svg.viewBox.baseVal.height - 24}`);
      svg.append(cursor);
      tip.replaceChildren(make("b", "", `${told.x} ${Number(x.toPrecision(6))}`));
      for (const series of told.series) {
        const value = Object.entries(series.at).find(([key]) => Number(key) === x);
        if (value) tip.append(make("div", "", make("i", `swatch ${series.color}`), `${series.name}  ${value[1]}`));
      }
      chart.append(tip);
      const left = pixel * scale + 14;
      tip.style.left = `${left + tip.offsetWidth > box.width ? left - tip.offsetWidth - 28 : left}px`;
      tip.style.top = `${svg.offsetTop || box.top - chart.getBoundingClientRect().top}px`;
    };
    svg.onpointerleave = () => { tip.remove(); cursor.remove(); };
  }

  // ---- every episode as a bar
  const bars = data.timeline.bars || [];
  const canvas = byId("bars");
  const whole = data.timeline.note ? [bars[0], bars.reduce((end, _, i) => (i % 5 ? end : Math.max(end, bars[i] + bars[i + 1])), 0)] : [0, data.timeline.end || 1];
  let view = [...whole];
  const lane = () => Math.max(1, Math.min(12, 420 / Math.max(1, data.timeline.lanes)));
  const TOP = 34;
  function drawBars() {
    if (!canvas) return;
    const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
    const colors = ["good", "half", "flat", "bad"].map(color);
    const ink = color("ink"), dim = color("dim"), train = color("c3"), publish = color("c4");
    const width = canvas.clientWidth, height = TOP + lane() * data.timeline.lanes + 22, ratio = devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const left = 56;
    const x = (ms) => left + ((ms - view[0]) / (view[1] - view[0])) * (width - left);
    pen.font = "11px system-ui, sans-serif";
    const row = (name, spans, y, fill) => {
      pen.fillStyle = fill;
      for (let i = 0; i < spans.length; i += 2) pen.fillRect(x(spans[i]), y, Math.max(0.7, x(spans[i + 1]) - x(spans[i])), 11);
    };
    row("train", data.timeline.train, 3, train);
    row("publish", data.timeline.publish, 16, publish);
    for (let i = 0; i < bars.length; i += 5) {
      const start = x(bars[i]), end = x(bars[i] + bars[i + 1]);
      if (end < left || start > width) continue;
      const y = TOP + bars[i + 2] * lane(), evaluation = bars[i + 3] >= 4;
      pen.fillStyle = colors[bars[i + 3] % 4];
      const gap = lane() > 4 ? 1 : 0.5;
      pen.fillRect(start, y, Math.max(0.8, end - start - gap), lane() - gap);
      if (evaluation && end - start > 3) {
        pen.strokeStyle = ink;
        pen.lineWidth = 0.8;
        pen.strokeRect(start + 0.5, y + 0.5, end - start - gap - 1, lane() - gap - 1);
      }
    }
    pen.fillStyle = getComputedStyle(canvas).backgroundColor;
    pen.fillRect(0, 0, left, height);
    pen.fillStyle = dim;
    pen.textAlign = "right";
    pen.fillText("train", left - 8, 12);
    pen.fillText("publish", left - 8, 25);
    pen.fillText("episodes", left - 8, TOP + 10);
    pen.textAlign = "center";
    const span = view[1] - view[0];
    const step = [10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 15e3, 3e4, 6e4, 12e4, 3e5, 6e5, 18e5, 36e5, 72e5, 144e5, 864e5].find((s) => span / s <= 12) || span / 8;
    for (let t = Math.ceil(view[0] / step) * step; t < view[1]; t += step) if (x(t) < width - 24 && x(t) > left + 14) pen.fillText(seconds(t / 1000), x(t), height - 7);
  }
  if (canvas) {
    if (data.timeline.note) byId("bars-note").textContent = `${data.timeline.note}; ${byId("bars-note").textContent}`;
    const time = (event) => view[0] + ((event.offsetX - 56) / (canvas.clientWidth - 56)) * (view[1] - view[0]);
    const clamp = (low, high) => {
      const whole = data.timeline.end, span = Math.min(whole, Math.max(50, high - low));
      const start = Math.min(Math.max(0, low), whole - span);
      view = [start, start + span];
      drawBars();
    };
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const at = time(event), factor = event.deltaY > 0 ? 1.25 : 0.8;
      clamp(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
    }, { passive: false });
    let drag = null;
    canvas.onpointerdown = (event) => { drag = { x: event.offsetX, view: [...view], moved: false }; canvas.setPointerCapture(event.pointerId); };
    canvas.onpointerup = (event) => {
      if (drag && !drag.moved) {
        const at = time(event), row = Math.floor((event.offsetY - TOP) / lane());
        for (let i = 0; i < bars.length; i += 5) {
          if (bars[i + 2] === row && bars[i] <= at && at <= bars[i] + bars[i + 1] && bars[i + 4] >= 0) {
            openEpisode(bars[i + 4]);
            byId("episodes").scrollIntoView();
            break;
          }
        }
      }
      drag = null;
    };
    canvas.onpointermove = (event) => {
      if (!drag) return;
      const shift = ((drag.x - event.offsetX) / (canvas.clientWidth - 56)) * (drag.view[1] - drag.view[0]);
      drag.moved ||= Math.abs(drag.x - event.offsetX) > 3;
      if (drag.moved) clamp(drag.view[0] + shift, drag.view[1] + shift);
    };
    canvas.ondblclick = () => clamp(...whole);
    addEventListener("resize", drawBars);
    drawBars();
  }

  // ---- episodes and their conversations
  const list = byId("list");
  const chip = (label) => make("i", `chip ${["solved", "partial", "unsolved"].includes(label) ? label : "failure"}`);
  let visible = [];
  function openEpisode(place) {
    if (!visible.includes(place)) resetFilters();
    for (const item of list.children) item.classList.toggle("open", Number(item.dataset.place) === place);
    const open = list.querySelector(".open"); // scrolled by hand: scrollIntoView would move the page too
    if (open) {
      const top = open.offsetTop - list.offsetTop;
      if (top < list.scrollTop) list.scrollTop = top;
      else if (top + open.offsetHeight > list.scrollTop + list.clientHeight) list.scrollTop = top + open.offsetHeight - list.clientHeight;
    }
    byId("conversation").replaceChildren(...conversation(data.episodes[place]));
    byId("conversation").scrollTop = 0;
  }
  const rewardOf = (reward) => (reward === null ? "failed" : reward >= 1 ? "solved" : reward > 0 ? "partial" : "");
  function conversation(e) {
    const [admitted, oldest, newest] = e.versions;
    const wrote = oldest === null ? "" : oldest === newest ? `, written by version ${oldest}` : `, written by versions ${oldest} to ${newest}`;
    const parts = [
      make("h3", "", chip(e.label), e.task),
      make("small", "", `${e.kind} episode ${e.id}${e.attempt ? `, attempt ${e.attempt + 1}` : ""} - admitted at version ${admitted ?? "?"}${wrote} - ${e.tokens} tokens in ${seconds(e.took)}`),
    ];
    if (e.group.length) {
      const dots = make("span", "dots", ...e.group.map((reward) => make("i", rewardOf(reward))));
      const known = e.group.filter((reward) => reward !== null);
      const mean = known.length ? (known.reduce((a, b) => a + b, 0) / known.length).toFixed(2) : "-";
      parts.push(make("div", "", make("small", "", `its group, mean reward ${mean}`), dots));
    }
    const said = (who, head, ...bodies) => make("div", `said ${who}`, make("small", "", head), ...bodies);
    parts.push(said("world", "prompt", make("pre", "", e.prompt || "(none)")));
    e.turns.forEach((turn, i) => {
      const versions = turn.versions.length ? `, version ${turn.versions.join(", ")}` : "";
      const logprob = turn.logprob === null ? "" : `, mean log-probability ${turn.logprob}`;
      parts.push(said("policy", `policy, turn ${i + 1} - ${turn.tokens} tokens${versions}${logprob}, ${turn.cached} cached, ${seconds(turn.generate)}`, make("pre", "", turn.text)));
      if (turn.observation || turn.command) parts.push(said("world", `terminal, ${seconds(turn.exec)}`, make("pre", "", turn.observation || "(no output)")));
    });
    const ending = e.reward === null ? `no reward: ${e.label}` : `reward ${e.reward}`;
    const detail = e.detail ? make("pre", "", e.detail) : "";
    parts.push(said(e.reward === null ? "trouble" : e.reward > 0 ? "verifier" : "world", `${ending} - stopped: ${e.stop}`, detail));
    const times = Object.entries(e.timings).map(([name, value]) => `${name.replace(/_s$/, "")} ${seconds(value)}`).join(", ");
    if (times) parts.push(make("small", "", times));
    return parts;
  }
  const filters = { kind: byId("by-kind"), label: byId("by-label"), task: byId("by-task") };
  const searched = data.episodes.map((e) => [e.id, e.task, e.prompt, e.detail, ...e.turns.flatMap((t) => [t.text, t.observation])].join("\n").toLowerCase());
  function resetFilters() {
    for (const select of Object.values(filters)) select.value = "";
    byId("by-text").value = "";
    fill();
  }
  function fill() {
    const text = byId("by-text").value.toLowerCase(), order = byId("by-order").value;
    const size = (e) => (order === "turns" ? e.turns.length : e[order]);
    visible = data.episodes.map((_, place) => place).filter((place) => {
      const e = data.episodes[place];
      return Object.entries(filters).every(([key, select]) => !select.value || e[key] === select.value) && (!text || searched[place].includes(text));
    });
    visible.sort((a, b) => (size(data.episodes[a]) - size(data.episodes[b])) * (order === "at" ? 1 : -1));
    list.replaceChildren(...visible.map((place) => {
      const e = data.episodes[place];
      const item = make("li", "", chip(e.label), make("b", "", e.task), make("span", "num", e.reward === null ? "-" : String(e.reward)),
        make("small", "", `${e.kind}, version ${e.versions[0] ?? "?"}, ${e.turns.length} ${e.turns.length === 1 ? "turn" : "turns"}, ${seconds(e.took)}, at ${seconds(e.at)}`));
      item.dataset.place = place;
      item.onclick = () => openEpisode(place);
      return item;
    }));
    byId("count").textContent = `${visible.length} shown`;
    if (visible.length) openEpisode(visible[0]);
    else byId("conversation").replaceChildren(make("p", "dim", "No episode matches."));
  }
  if (list) {
    const names = { kind: "all kinds", label: "all outcomes", task: "all tasks" };
    for (const [key, select] of Object.entries(filters)) {
      const values = [...new Set(data.episodes.map((e) => e[key]))].sort();
      for (const value of ["", ...values]) {
        const option = make("option", "", value || names[key]);
        option.value = value;
        select.append(option);
      }
      select.onchange = fill;
    }
    byId("by-text").oninput = fill;
    byId("by-order").onchange = fill;
    list.onkeydown = (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const now = visible.indexOf(Number(list.querySelector(".open")?.dataset.place));
      if (visible[now + step] !== undefined) openEpisode(visible[now + step]);
    };
    fill();
  }
})();
