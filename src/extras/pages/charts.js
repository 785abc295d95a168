// Plots the charts of report.html from the JSON in its element "data". Functions that need no page come first.
"use strict";

// Formats a number as 1.234, 567.8, 1.23k, 45.6M, 7.89B or 1.23T.
function showNumber(x) {
  for (const [unit, name] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(x) >= unit) return Number((x / unit).toPrecision(3)) + name;
  return x === 0 || Math.abs(x) >= 1e-3 ? String(Number(x.toPrecision(4))) : Number(x.toPrecision(3)).toExponential();
}

const show = (chart, x) => (chart.percent ? Number((100 * x).toFixed(2)) + "%" : showNumber(x));

// At most count + 1 multiples of 1, 2 or 5 times a power of ten within [low, high].
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const gap = [1, 2, 5, 10].map((factor) => factor * power).find((gap) => gap >= rough * (1 - 1e-9));
  const result = [];
  for (let i = Math.ceil(low / gap - 1e-9); i <= Math.floor(high / gap + 1e-9); i++) result.push(i * gap);
  return result;
}

// Powers of ten within [low, high]; if there are few, also 3 times, or 2 and 5 times, these.
function logTicks(low, high) {
  let result = [];
  for (const factors of [[1], [1, 3], [1, 2, 5]]) {
    result = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
      result.push(...factors.map((factor) => factor * 10 ** e).filter((x) => x >= low && x <= high));
    if (result.length >= 3) break;
  }
  return result;
}

// The median of finite values in a window of `width` points around each point: it neither lags nor follows spikes.
function runningMedian(points, width) {
  const half = Math.floor(width / 2);
  return points.map(([step], i) => {
    const values = points.slice(Math.max(0, i - half), i + half + 1).map((p) => p[1]).filter((x) => x !== null);
    return [step, values.length ? values.sort((a, b) => a - b)[Math.floor(values.length / 2)] : null];
  });
}

// The points within the view, and one more on each side, so that lines reach the edges.
function inView(points, [first, last]) {
  let begin = points.findIndex(([step]) => step >= first), end = points.findIndex(([step]) => step > last);
  if (begin < 0) begin = points.length;
  if (end < 0) end = points.length;
  return points.slice(Math.max(0, begin - 1), end + 1);
}

// The curves of a chart within the view; noisy ones are faint, with a running median over a fiftieth of the view.
function curves(chart, view) {
  return chart.series.flatMap((series) => {
    const points = inView(series.points, view), medians = inView(series.medians || series.points, view);
    const width = 2 * Math.floor(medians.length / 100) + 1;
    if (series.kind !== "noisy" || width < 5) return [{ ...series, points, style: series.kind === "eval" ? "marked" : "line" }];
    const steps = width * (medians[1][0] - medians[0][0]), several = chart.series.some(({ run }) => run > 0);
    const name = several ? series.name : `${series.name} median of ${steps} steps`;
    return [
      { ...series, points, style: "raw" },
      { ...series, points: runningMedian(medians, width), style: "line", isMedian: true, name },
    ];
  });
}

// The values at the chart's lower and upper edge, and a note on values above. The loss is scaled without the first
// twentieth of the steps and the highest spikes: the first steps would flatten the rest.
function valueRange(chart, drawn, log, whole) {
  const points = drawn.flatMap((curve) => curve.points).filter(([, x]) => x !== null && (!log || x > 0));
  const values = points.map((point) => point[1]);
  if (!values.length) return { low: log ? 0.1 : 0, high: 1, note: "" };
  const reduce = (f, xs) => xs.reduce((a, b) => f(a, b));
  let low = reduce(Math.min, values), high = reduce(Math.max, values), note = "";
  if (log) return { low: low / 1.1, high: high * 1.1, note };
  if (chart.scale.includes("settled") && whole) {
    const steps = points.map(([step]) => step), first = reduce(Math.min, steps);
    const isShort = drawn.every(({ points }) => points.length < 20);
    const start = isShort ? first : first + (reduce(Math.max, steps) - first) / 20;
    const tops = drawn.map(({ points }) => {
      const finite = points.filter((point) => point[1] !== null);
      const after = finite.filter(([step]) => step >= start).map((point) => point[1]).sort((a, b) => a - b);
      return after[Math.ceil(0.995 * after.length) - 1] ?? finite.at(-1)?.[1] ?? low; // for a much shorter run, its end
    });
    const top = reduce(Math.max, tops);
    if (high - low > 1.5 * (top - low)) {
      const all = drawn.filter((curve) => curve.kind !== "eval" && !curve.isMedian).flatMap((curve) => curve.points);
      const above = all.filter((point) => point[1] > top).length;
      // The highest speed is meaningless: speeds are computed from the times at which steps were recorded.
      const rest = chart.scale.includes("zero") ? ": a step recorded late makes the next look fast." : `, up to ${show(chart, high)}.`;
      note = `${above} of ${all.length} points lie above the chart${rest}`;
      high = top;
    }
  }
  if (chart.scale.includes("zero")) low = Math.min(low, 0);
  const room = (high - low) / 20 || Math.abs(high) / 2 || 1;
  return { low: low === 0 ? 0 : low - room, high: high + room, note };
}

// Initially logarithmic if values are positive and vary widely, such as norms in a run with spikes.
function startsLog(chart) {
  const values = chart.series.flatMap(({ points }) => points.map((point) => point[1])).filter((x) => x !== null);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  return chart.scale === "wide" && low > 0 && high > 5 * low;
}

// The height of a value in a chart: 0 at the lower edge, 1 at the upper edge.
function height(x, { low, high }, log) {
  return log ? Math.log(Math.max(x, low / 10) / low) / Math.log(high / low) : (x - low) / (high - low);
}

// SVG paths of a curve in a square of 1000: its line, interrupted at missing values, and its dots.
function paths(curve, view, range, log) {
  let line = "", dots = "", down = false;
  curve.points.forEach(([step, x], i) => {
    if (x === null) return void (down = false);
    const at = [(1000 * (step - view[0])) / (view[1] - view[0]), 1000 * (1 - height(x, range, log))].map((n) => n.toFixed(1));
    const next = curve.points[i + 1];
    line += (down ? "L" : "M") + at.join(" ");
    // A line of length zero with round ends stays round when the SVG is stretched.
    if (curve.style === "marked" || !(down || (next && next[1] !== null))) dots += `M${at.join(" ")}h0`;
    down = true;
  });
  return [line, dots];
}

function nearest(points, step) {
  const finite = points.filter((point) => point[1] !== null);
  return finite.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best), finite[0]);
}

// The color of a run among several, for its curves and its column heads in tables.
const runColor = (run, kind) => `hsl(${205 + 137 * run} 60% ${kind === "eval" ? 32 : 46}%)`;

const figures = []; // a function per figure that redraws it
let zoom = null; // the first and last step shown in all figures; null: the whole runs

function build(chart, runs) {
  const figure = document.createElement("figure");
  figure.innerHTML = `<figcaption><b></b><span class="legend"></span><label><input type="checkbox">log</label><output></output>
    </figcaption><div class="chart"><div class="y"></div><div class="plot"><svg viewBox="0 0 1000 1000" role="img"
    preserveAspectRatio="none"></svg><i></i><s></s></div><div class="x"></div></div><p class="note"></p>`;
  const part = (selector) => figure.querySelector(selector);
  const [plot, svg, line, area, output, log] = [".plot", "svg", ".plot i", ".plot s", "output", "input"].map(part);
  part("b").textContent = chart.title;
  svg.setAttribute("aria-label", chart.title);
  log.checked = startsLog(chart);
  const steps = chart.series.flatMap(({ points }) => [points[0][0], points[points.length - 1][0]]);
  let view, drawn;
  const color = ({ run, kind }) => (runs > 1 ? runColor(run, kind) : kind === "eval" ? "var(--eval)" : "var(--train)");
  const named = () => drawn.filter((curve) => runs === 1 || curve.style !== "raw");
  const draw = () => {
    view = zoom || [Math.min(...steps), Math.max(...steps)];
    if (view[0] === view[1]) view = [view[0], view[0] + 1]; // a single step is at the left edge
    drawn = curves(chart, view).filter((curve) => curve.points.length);
    const range = valueRange(chart, drawn, log.checked, !zoom);
    let yTicks = log.checked ? logTicks(range.low, range.high) : [];
    if (yTicks.length < 2) yTicks = ticks(range.low, range.high, 6);
    const xTicks = ticks(view[0], view[1], 5).filter((step) => Number.isInteger(step));
    const top = (x) => 100 * (1 - height(x, range, log.checked));
    svg.innerHTML = yTicks.map((x) => `<path class="grid" d="M0 ${10 * top(x)}H1000"/>`).join("") + drawn.map((curve) =>
      paths(curve, view, range, log.checked).map((d, i) =>
        `<path class="${curve.style} ${i ? "dots" : curve.kind}" style="stroke:${color(curve)}" d="${d}"/>`).join("")).join("");
    part(".y").innerHTML = yTicks.map((x) => `<span style="top:${top(x)}%">${show(chart, x)}</span>`).join("");
    part(".x").innerHTML = xTicks.map((step) =>
      `<span style="left:${(100 * (step - view[0])) / (view[1] - view[0])}%">${showNumber(step)}</span>`).join("");
    part(".legend").replaceChildren(...(Math.max(drawn.length, runs) > 1 ? named() : []).map((curve) => {
      const name = Object.assign(document.createElement("span"), { textContent: curve.name, className: curve.style });
      name.style.setProperty("--color", color(curve));
      return name;
    }));
    part(".note").textContent = [chart.note, range.note].filter(Boolean).join(" ");
  };
  const stepAt = (event) => {
    const box = plot.getBoundingClientRect();
    return view[0] + (view[1] - view[0]) * Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
  };
  const left = (step) => (100 * (step - view[0])) / (view[1] - view[0]);
  let from = null; // the step where a drag began
  plot.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") from = stepAt(event); });
  plot.addEventListener("pointermove", (event) => {
    const step = stepAt(event);
    const near = named().map((curve) => [curve.name, nearest(curve.points, step)]).filter(([, point]) => point);
    if (!near.length) return;
    const at = near[near.length - 1][1][0];
    line.style.left = left(at) + "%";
    line.style.opacity = 0.5;
    output.textContent = at.toLocaleString("en") + ": " +
      near.map(([name, [, x]]) => (near.length > 1 ? name + " " : "") + show(chart, x)).join(" · ");
    Object.assign(area.style, from === null ? { width: 0 }
      : { left: left(Math.min(from, step)) + "%", width: Math.abs(left(step) - left(from)) + "%" });
  });
  addEventListener("pointerup", (event) => {
    if (from === null) return;
    const range = [from, stepAt(event)].sort((a, b) => a - b);
    from = null;
    area.style.width = 0;
    if (left(range[1]) - left(range[0]) < 1) return; // a click
    zoom = range;
    figures.forEach((draw) => draw());
  });
  plot.addEventListener("dblclick", () => { zoom = null; figures.forEach((draw) => draw()); });
  plot.addEventListener("pointerleave", () => { line.style.opacity = 0; output.textContent = ""; });
  log.addEventListener("change", draw);
  figures.push(draw);
  return figure;
}

// A heat map: a column per step, and rows by name, the first at the bottom; colors are logarithmic.
function heatMap({ title, steps, rows, values }) {
  const figure = document.createElement("figure");
  figure.innerHTML = `<figcaption><b></b><output></output></figcaption><div class="chart"><div class="y"></div>
    <div class="plot"><canvas></canvas></div><div class="x"></div></div><p class="note"></p>`;
  const part = (selector) => figure.querySelector(selector), canvas = part("canvas"), layers = rows.length;
  const all = values.flat().filter((x) => x > 0), low = Math.min(...all), high = Math.max(...all);
  part("b").textContent = title;
  part(".note").textContent = `From ${showNumber(low)} (blue) to ${showNumber(high)} (yellow), on a logarithmic scale.`;
  [canvas.width, canvas.height] = [steps.length, layers];
  canvas.style.cssText = "display: block; width: 100%; height: 100%; image-rendering: pixelated";
  const pen = canvas.getContext("2d");
  values.forEach((column, i) => column.forEach((x, layer) => {
    const part = x > 0 ? (high > low ? Math.log(x / low) / Math.log(high / low) : 0.5) : null;
    pen.fillStyle = part === null ? "#888" : `hsl(${250 - 200 * part} 70% ${25 + 40 * part}%)`;
    pen.fillRect(i, layers - 1 - layer, 1, 1);
  }));
  part(".y").innerHTML = [0, layers - 1].map((layer) =>
    `<span style="top:${100 * (1 - (layer + 0.5) / layers)}%">${rows[layer].match(/\d[\d.]*/)}</span>`).join("");
  part(".x").innerHTML = [0, steps.length - 1].map((i) =>
    `<span style="left:${(100 * (i + 0.5)) / steps.length}%">${showNumber(steps[i])}</span>`).join("");
  canvas.addEventListener("pointermove", (event) => {
    const i = Math.min(steps.length - 1, Math.max(0, Math.floor((event.offsetX / canvas.clientWidth) * steps.length)));
    const row = Math.min(layers - 1, Math.max(0, Math.floor((event.offsetY / canvas.clientHeight) * layers)));
    const x = values[i][layers - 1 - row];
    part("output").textContent = `step ${steps[i]}, ${rows[layers - 1 - row]}: ${x === null ? "not finite" : showNumber(x)}`;
  });
  return figure;
}

if (typeof document !== "undefined") {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.getElementById("charts").append(...data.charts.map((chart) => build(chart, data.runs.length)), ...data.maps.map(heatMap));
  figures.forEach((draw) => draw());
  document.querySelectorAll("[data-run]").forEach((mark) => { mark.style.background = runColor(Number(mark.dataset.run)); });
}
