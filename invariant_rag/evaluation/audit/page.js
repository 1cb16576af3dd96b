"use strict";
// Shows every question of an audit: sortable, filterable, with its documents and answers; and exports them as CSV.
// Texts come from documents and models. They are only ever set as textContent.
const asked = JSON.parse(document.getElementById("asked").textContent);
const body = document.querySelector("#questions tbody");
const search = document.getElementById("search");
const show = document.getElementById("show");
const more = document.getElementById("more");

const rows = asked.map((each, index) => {
  const failed = each.asked.filter((a) => a.text === null).length;
  const text = [each.question, each.id, ...each.answers, ...each.asked.map((a) => a.text || "")].join("\n").toLowerCase();
  const { today, accuracy, worst } = each.accuracy;
  return { each, index, id: each.id, question: each.question, today, accuracy, worst, flips: each.flips ? 1 : 0,
           failed, text };
});
const filters = { all: () => true, flips: (row) => row.flips, wrong: (row) => row.today !== null && row.today < 0.5,
                  failed: (row) => row.failed };
// A long list is shown in pages: shorter ones on a phone.
const page = matchMedia("(max-width: 40rem)").matches ? 10 : 50;
let sortedBy = "index", descending = false, limit = page;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function number(value) {
  return value === null ? "" : value.toFixed(2);
}

function compare(one, other) {
  const [a, b] = [one[sortedBy], other[sortedBy]];
  if (a === null || b === null) return (a === null) - (b === null);
  const order = typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
  return (descending ? -order : order) || one.index - other.index;
}

function detail(each) {
  const cell = element("td");
  cell.colSpan = 6;
  if (each.answers.length) cell.append(element("h3", "Gold answers"), element("div", each.answers.join(" | ")));
  const extra = Object.entries(each.extra);
  if (extra.length) cell.append(element("h3", "Other fields"), element("div", extra.map((e) => e.join(": ")).join("; ")));
  cell.append(element("h3", "Documents, as your retriever gives them"));
  each.segments.forEach((segment, index) => {
    const score = segment.score === null ? "" : ` (score ${segment.score})`;
    const title = `${index + 1}. ${segment.title || ""}${score}`;
    const box = element("div", `${title}\n${segment.text}`, each.gold.includes(index) ? "document gold" : "document");
    cell.append(box);
  });
  cell.append(element("h3", "Answers"));
  const table = element("table");
  const head = element("tr");
  ["system", "order", "documents", "score", "answer"].forEach((name) => head.append(element("th", name)));
  table.append(head);
  for (const answer of each.asked) {
    const row = element("tr");
    const listed = answer.order.map((index) => index + 1).join(" ");
    row.append(element("td", answer.remedy), element("td", answer.kind), element("td", listed));
    const grade = answer.score === null ? "" : answer.score >= 0.5 ? "right" : "wrong";
    row.append(element("td", number(answer.score), grade));
    row.append(element("td", answer.text === null ? "(the call failed)" : answer.text, "text"));
    table.append(row);
  }
  const scroll = element("div", undefined, "scroll");
  scroll.append(table);
  cell.append(scroll);
  const row = element("tr", undefined, "detail");
  row.append(cell);
  return row;
}

function toggle(row, each) {
  const next = row.nextElementSibling;
  if (next && next.className === "detail") next.remove();
  else row.after(detail(each));
}

function render() {
  const wanted = search.value.toLowerCase();
  const chosen = rows.filter((row) => filters[show.value](row) && row.text.includes(wanted)).sort(compare);
  body.replaceChildren();
  for (const row of chosen.slice(0, limit)) {
    const line = element("tr", undefined, "question");
    line.tabIndex = 0;
    line.append(element("td", row.id), element("td", row.question, "text"), element("td", number(row.today)),
                element("td", number(row.accuracy)), element("td", number(row.worst)), element("td", row.flips ? "yes" : ""));
    line.addEventListener("click", () => toggle(line, row.each));
    line.addEventListener("keydown", (event) => event.key === "Enter" && toggle(line, row.each));
    body.append(line);
  }
  document.getElementById("count").textContent = `${chosen.length} of ${rows.length} question${rows.length === 1 ? "" : "s"}`;
  more.textContent = `Show ${Math.min(page, chosen.length - limit)} more`;
  more.hidden = chosen.length <= limit;
}

function renderAnew() {
  limit = page;
  render();
}

function csv() {
  // A leading = + - or @ would be a formula to a spreadsheet.
  const cell = (value) => `"${String(value ?? "").replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;
  const lines = [["id", "question", "gold answers", "system", "order", "documents", "score", "answer"]];
  for (const each of asked) for (const a of each.asked) {
    const listed = a.order.map((index) => index + 1).join(" ");
    lines.push([each.id, each.question, each.answers.join("|"), a.remedy, a.kind, listed, a.score, a.text]);
  }
  return lines.map((line) => line.map(cell).join(",")).join("\r\n") + "\r\n";
}

document.querySelectorAll("#questions th button").forEach((button) => button.addEventListener("click", () => {
  descending = sortedBy === button.dataset.key ? !descending : false;
  sortedBy = button.dataset.key;
  renderAnew();
}));
search.addEventListener("input", renderAnew);
show.addEventListener("change", renderAnew);
more.addEventListener("click", () => {
  limit += page;
  render();
});
document.getElementById("export").addEventListener("click", () => {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
  link.download = "audit.csv";
  link.click();
  URL.revokeObjectURL(link.href);
});
render();
