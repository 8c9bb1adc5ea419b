// Prompts over the steps of a run, and search.

import { chart } from "./charts";
import { count, firstLine, h, mean, number, text, virtualList } from "./dom";
import { loadPrompts, loadStep, type Group, type Overview, type Prompts, type StepData } from "./data";

export async function promptsView(): Promise<HTMLElement> {
  const prompts = await loadPrompts();
  const list = virtualList("Prompts", prompts.texts.length, 44, (index) => promptRow(prompts, index));
  return h(
    "div",
    { class: "page tall" },
    h("h1", {}, "Prompts"),
    h("div", { class: "tools" }, h("span", {}, `${count(prompts.texts.length)} prompts. A prompt that was trained several times shows its first and its last mean reward.`)),
    prompts.texts.length ? list.element : h("p", { class: "quiet" }, "No step was trained yet."),
  );
}

function promptRow(prompts: Prompts, index: number): HTMLElement {
  const at = prompts.at[index];
  const [first, last] = [at[0][2], at[at.length - 1][2]];
  return h(
    "a",
    { class: "group-row", href: `#/prompt/${index}` },
    h("span", { class: "num" }, `${at.length}×`),
    h("span", { class: "prompt", dir: "auto" }, firstLine(prompts.texts[index])),
    h("span", { class: "num wide" }, at.length > 1 ? `${number(first)} → ${number(last)}` : number(last)),
  );
}

export async function promptView(index: number): Promise<HTMLElement> {
  const prompts = await loadPrompts();
  const at = prompts.at[index];
  if (!at) return h("div", { class: "page" }, h("h1", {}, "No such prompt"));
  const open = (step: number) => (location.hash = `#/step/${step}/group/${at.find(([each]) => each === step)?.[1] ?? 0}`);
  const curve = chart("mean reward of its groups", [{ name: "", steps: at.map(([step]) => step), values: at.map(([, , reward]) => reward) }], [], open);
  const holder = h("div", { class: "over-steps" });
  const some = at.length > 12 ? [...at.slice(0, 6), ...at.slice(-6)] : at;
  void (async () => {
    for (const [step, number_] of some) holder.append(appearance(step, number_, (await loadStep(step)).groups[number_]));
  })();
  return h(
    "div",
    { class: "page" },
    h("h1", {}, h("a", { href: "#/prompts" }, "Prompts"), ` · trained ${at.length}×`),
    text(prompts.texts[index]),
    h("div", { class: "charts" }, curve),
    some.length < at.length ? h("p", { class: "quiet" }, `The first six and the last six of ${at.length} times are below.`) : null,
    holder,
  );
}

function appearance(step: number, index: number, group: Group): HTMLElement {
  const scored = group.samples.filter((sample) => sample.reward !== null).sort((a, b) => (b.reward ?? 0) - (a.reward ?? 0));
  const ends = scored.length > 1 ? [scored[0], scored[scored.length - 1]] : scored;
  return h(
    "article",
    { class: "sample" },
    h("h2", {}, h("a", { href: `#/step/${step}/group/${index}` }, `step ${step}`), h("span", { class: "quiet" }, ` mean ${number(mean(scored.map((sample) => sample.reward ?? 0)))}`)),
    ...ends.map((sample) => h("div", {}, h("b", {}, number(sample.reward)), text(sample.response.slice(0, 600), "text said"))),
  );
}

type Hit = { href: string; where: string; line: string };
const MOST_HITS = 500;

/** Prompts at once; responses of all steps when asked, for their files are read one after the other. */
export async function searchView(query: string, overview: Overview): Promise<HTMLElement> {
  const needle = query.toLowerCase();
  const hits: Hit[] = [];
  const list = h("div", { class: "hits" });
  const said = h("p", { role: "status" });
  const draw = () => {
    list.replaceChildren(...hits.slice(0, MOST_HITS).map((hit) => h("a", { class: "hit", href: hit.href }, h("b", {}, hit.where), h("span", { dir: "auto" }, hit.line))));
    said.replaceChildren(`${count(hits.length)} found${hits.length > MOST_HITS ? `, the first ${MOST_HITS} are shown` : ""}.`);
  };
  const prompts = await loadPrompts();
  prompts.texts.forEach((prompt, index) => {
    if (prompt.toLowerCase().includes(needle)) hits.push({ href: `#/prompt/${index}`, where: `prompt, trained ${prompts.at[index].length}×`, line: around(prompt, needle) });
  });
  draw();
  const steps = [...overview.steps.step].reverse();
  const bar = h("progress", { max: steps.length || 1, value: 0, "aria-label": "Steps that were searched" });
  let running = false;
  const button = h("button", { onclick: () => (running ? (running = false) : void all()) }, `search the responses of ${count(steps.length)} steps`);
  let next = 0;
  const all = async () => {
    running = true;
    button.textContent = "stop";
    while (running && next < steps.length && list.isConnected) {
      hits.push(...inStep(await loadStep(steps[next++]), needle));
      bar.value = next;
      if (next % 10 === 0) draw();
    }
    running = false;
    button.textContent = next < steps.length ? "go on" : "all steps are searched";
    button.disabled = next >= steps.length;
    draw();
  };
  return h("div", { class: "page" }, h("h1", {}, `Search: ${query}`), h("div", { class: "tools" }, button, bar), said, list);
}

function inStep(data: StepData, needle: string): Hit[] {
  return data.groups.flatMap((group, index) =>
    group.samples.flatMap((sample) => {
      const texts = [sample.id, sample.response, group.label ?? "", ...sample.turns.map((turn) => turn.content)];
      const found = texts.find((each) => each.toLowerCase().includes(needle));
      const href = `#/step/${data.step}/sample/${encodeURIComponent(sample.id)}`;
      return found === undefined ? [] : [{ href, where: `step ${data.step}, group ${index}, reward ${number(sample.reward)}`, line: around(found, needle) }];
    }),
  );
}

function around(content: string, needle: string): string {
  const at = content.toLowerCase().indexOf(needle);
  const from = Math.max(0, at - 60);
  return (from ? "… " : "") + content.slice(from, at + needle.length + 120).replace(/\s+/g, " ");
}
