// Draws two strategies of a table of this page, by round. All figures are those of the page's tables.
"use strict";
{
  const FIELDS = { page: "Experiment", data: "Data", skew: "Skew", strategy: "Strategy", beside: "Beside it" };
  const WIDTH = 340, HEIGHT = 220, LEFT = 48, RIGHT = 14, TOP = 10, BOTTOM = 38;

  /** Return an SVG element with children, which may be text. */
  const svg = (tag, attributes, ...children) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    made.append(...children);
    return made;
  };
  const html = (tag, attributes, ...children) => {
    const made = Object.assign(document.createElement(tag), attributes);
    made.append(...children);
    return made;
  };

  /** Return what a folded table has: its place, its columns, and a body per strategy. */
  const read = details => {
    const table = details.querySelector("table");
    const bodies = [...table.tBodies];
    return {
      ...details.dataset, table,
      columns: [...table.tHead.rows[0].cells].map(cell => cell.textContent),
      strategies: new Map(bodies.map(body => [body.dataset.strategy, body])),
      reference: bodies.find(body => "reference" in body.dataset).dataset.strategy,
    };
  };
  const cells = [...document.querySelectorAll("details[data-page]")].map(read);
  const root = document.getElementById("explorer");

  /** Return the texts of a column by round, without dashes; of no column none. */
  const texts = (body, column) => new Map([...body.rows].slice(1).map(
    row => [Number(row.cells[0].textContent), row.cells[column]?.textContent ?? "-"]).filter(([, text]) => text !== "-"));
  /** Return round, mean and ends of the interval of texts: "0.5 [0.4, 0.6]" or "0.5". */
  const points = found => [...found].map(([round, text]) => {
    const [mean, low = mean, high = mean] = text.match(/[-+]?[\d.]+(e[-+]?\d+)?/gi).map(Number);
    return { round, mean, low, high };
  });

  /** Return round numbers from low to high, about six. */
  const ticks = (low, high, least) => {
    const rough = Math.max((high - low) / 6, least);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find(factor => power * factor >= rough * 0.999);
    const count = Math.floor((high - low) / step + 2);
    const first = Math.ceil(low / step - 1e-9);
    return [...Array(count).keys()].map(n => (first + n) * step).filter(tick => tick <= high + step * 1e-9);
  };

  /** Strategies differ by colour, by the form of their marks and by their lines. */
  const mark = (index, x, y) => index
    ? svg("rect", { class: "mark", x: x - 4, y: y - 4, width: 8, height: 8 })
    : svg("circle", { class: "mark", cx: x, cy: y, r: 4.5 });
  const dash = index => index ? "5 4" : "none";

  const chart = (metric, series) => {
    const all = series.flatMap(own => own.points);
    const rounds = all.map(point => point.round);
    let [low, high] = [Math.min(...all.map(point => point.low)), Math.max(...all.map(point => point.high))];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
    [low, high] = [low - room, high + room];
    const [first, last] = [Math.min(...rounds), Math.max(...rounds)];
    const middle = (WIDTH + LEFT - RIGHT) / 2, inner = WIDTH - LEFT - RIGHT - 24;
    const x = round => first === last ? middle : LEFT + 12 + (round - first) / (last - first) * inner;
    const y = value => TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM);
    const label = `${metric} by round: the figures of the table that follows`;
    const made = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
    const levels = ticks(low, high, 0);
    const digits = Math.max(0, Math.ceil(-Math.log10(levels[1] - levels[0]) - 1e-9));
    levels.forEach(level => made.append(
      svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(level), y2: y(level) }),
      svg("text", { x: LEFT - 6, y: y(level) + 4, "text-anchor": "end" }, level.toFixed(digits))));
    ticks(first, last, 1).forEach(round => made.append(
      svg("text", { x: x(round), y: HEIGHT - BOTTOM + 17, "text-anchor": "middle" }, String(round))));
    made.append(svg("text", { x: middle, y: HEIGHT - 5, "text-anchor": "middle" }, "round"));
    series.forEach((own, index) => {
      // Marks of two strategies stand side by side.
      const at = point => x(point.round) + (series.length - 1) * (index * 6 - 3);
      const group = svg("g", { class: `series-${index}` });
      group.append(svg("polyline", { class: "line", "stroke-dasharray": dash(index),
        points: own.points.map(point => `${at(point)},${y(point.mean)}`).join(" ") }));
      own.points.forEach(point => group.append(
        svg("path", { class: "whisker", d: `M${at(point)} ${y(point.low)}V${y(point.high)}` +
          [point.low, point.high].map(end => `M${at(point) - 3} ${y(end)}h6`).join("") }),
        mark(index, at(point), y(point.mean))));
      made.append(group);
    });
    return made;
  };

  /** Return a text in parts that stay on a line: a mean and its interval. */
  const broken = text => text.split(/(?= \[)/).flatMap((part, n) => n ? [" ", html("span", {}, part.trim())] : [part]);

  /** Return the figures of a chart as a table: a column per strategy, and per difference from the reference. */
  const figures = (metric, reference, series) => {
    const columns = series.map(own => [own.name, own.texts]).concat(series.filter(own => own.differences.size).map(
      own => [`${own.name} minus ${reference}`, own.differences]));
    const rounds = [...new Set(series.flatMap(own => [...own.texts.keys()]))].sort((one, other) => one - other);
    const header = ["round", ...columns.map(([name]) => name)].map(name => html("th", { scope: "col" }, name));
    const lines = rounds.map(round => html("tr", {}, html("th", { scope: "row" }, String(round)),
      ...columns.map(([, found]) => html("td", {}, ...broken(found.get(round) ?? "-")))));
    return html("table", { className: "figures", ariaLabel: metric }, html("thead", {}, html("tr", {}, ...header)),
      html("tbody", {}, ...lines));
  };

  const legend = (body, index) => {
    const sample = svg("svg", { viewBox: "0 0 44 12", width: 44, height: 12, "aria-hidden": true },
      svg("g", { class: `series-${index}` },
        svg("path", { class: "line", d: "M0 6h44", "stroke-dasharray": dash(index) }), mark(index, 22, 6)));
    const seeds = [...new Set(texts(body, 1).values())].sort().join(" or ");
    return html("p", { className: "legend" }, sample, ` ${body.rows[0].textContent} (seeds: ${seeds})`);
  };

  const selects = Object.fromEntries(Object.keys(FIELDS).map(name => [name, html("select", { id: `choose-${name}` })]));
  const summary = html("p", { className: "summary" });
  const charts = html("div", { className: "charts" });
  summary.setAttribute("aria-live", "polite");

  /** Fill a select with {value: text}; return the wanted value, else another one. */
  const offer = (name, options, wanted, other) => {
    const values = Object.keys(options);
    selects[name].replaceChildren(...values.map(value => html("option", { value }, options[value])));
    selects[name].value = values.includes(wanted) ? wanted : values.includes(other) ? other : values[0];
    return selects[name].value;
  };
  const named = (found, value, text = value) => Object.fromEntries(found.map(one => [one[value], one[text]]));

  const show = wanted => {
    const page = offer("page", named(cells, "page", "title"), wanted.page);
    const ofPage = cells.filter(cell => cell.page === page);
    const data = offer("data", named(ofPage, "data"), wanted.data);
    const ofData = ofPage.filter(cell => cell.data === data);
    const skew = offer("skew", named(ofData, "skew"), wanted.skew);
    const cell = ofData.find(cell => cell.skew === skew);
    const names = [...cell.strategies.keys()];
    const told = Object.fromEntries(names.map(name => [name, cell.strategies.get(name).rows[0].textContent]));
    const first = offer("strategy", told, wanted.strategy, names.find(name => name !== cell.reference));
    const second = offer("beside", told, wanted.beside, cell.reference);
    draw(cell, [...new Set([first, second])]);
    const chosen = Object.entries(selects).map(([name, select]) => [name, select.value]);
    history.replaceState(null, "", `#${new URLSearchParams(chosen)}`);
  };

  const draw = (cell, names) => {
    const bodies = names.map(name => cell.strategies.get(name));
    const metrics = cell.columns.slice(2).filter(name => !name.includes(":"));
    const found = metrics.map(metric => [metric, names.map((name, index) => {
      const own = texts(bodies[index], cell.columns.indexOf(metric));
      const difference = cell.columns.indexOf(`${metric}: difference from ${cell.reference}`);
      return { name, texts: own, points: points(own), differences: texts(bodies[index], difference) };
    })]).filter(([, series]) => series.some(own => own.texts.size));
    charts.replaceChildren(...bodies.map(legend), ...found.map(([metric, series]) => html("figure", {},
      html("figcaption", {}, metric), chart(metric, series), figures(metric, cell.reference, series))));
    const last = names.map((name, index) => `${name}: ${found.filter(([, series]) => series[index].texts.size).map(
      ([metric, series]) => `${metric} ${[...series[index].texts.values()].at(-1)}`).join(", ")}.`);
    const alone = metrics.includes("worst client") ? "" : " These rows have no accuracy of single clients.";
    summary.textContent = `${cell.data}, ${cell.skew}, after the last round. ${last.join(" ")}${alone}`;
  };

  const form = html("form", {}, ...Object.entries(FIELDS).map(([name, text]) =>
    html("label", { htmlFor: selects[name].id }, html("span", {}, text), selects[name])));
  form.addEventListener("change", () => show(Object.fromEntries(
    Object.entries(selects).map(([name, select]) => [name, select.value]))));
  form.addEventListener("submit", event => event.preventDefault());
  root.append(form, summary, charts);
  const linked = () => show(Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
  addEventListener("hashchange", linked);
  linked();
}
