// What headrace/view/data.py writes, and how it is loaded: a page that was opened as a file may add scripts, but not read files.

export type Numbers = (number | null)[];
export type Table = { step: number[]; time: number[]; columns: Record<string, Numbers> };
export type Counts = [string, number][];

export type Ledger = {
  source: "ledger" | "metrics";
  time: number | null;
  states: Record<string, number> | null;
  failures: Counts;
  filtered: Counts;
  staleness: [number, number][] | null;
  produced: number | null;
};

export type Overview = {
  version: number;
  headrace: string;
  run: string;
  folder: string;
  made: number;
  live: boolean;
  state: { phase: "running" | "finished" | "interrupted"; step: number | null; num_rollout: number };
  job: [string, string][];
  metrics: Table;
  evaluations: Table;
  marks: [number, string][];
  warnings: [number, string][];
  steps: { step: number[]; samples: Numbers; groups: number[]; tokens: number[] };
  evals: number[];
  untrained: { failed: number; filtered: number };
  ledger: Ledger;
  tokenizer: { error: string | null };
  notes: string[];
};

export type Turn = { role: string; content: string };
export type Sample = {
  id: string;
  index: number;
  status: string;
  reward: number | null;
  parts: Record<string, number | null>;
  advantage: number | null;
  gap: number | null;
  scorer: string;
  scorer_version: string;
  prompt_tokens: number;
  response_tokens: number;
  trained_tokens: number;
  ranges: [number, number, number][];
  response: string;
  turns: Turn[];
  metadata: Record<string, unknown> | null;
  failure: [string, string] | null;
  dropped: string | null;
  has_tokens: boolean;
};
export type Group = { id: string; prompt: string; label: string | null; version: number | null; samples: Sample[] };
export type StepData = { step: number; groups: Group[] };
export type EvaluationData = { step: number; sets: { name: string; groups: Group[] }[] };
export type UntrainedData = { groups: Group[] };
export type Prompts = { texts: string[]; at: [number, number, number | null][][] };
export type TokenColumns = { t: number[]; n: number; mask: number[]; engine: Numbers; trainer: Numbers; advantage: Numbers };
export type TokenData = { step: number; texts: string[] | null; ids: number[]; samples: Record<string, TokenColumns> };

const KEPT = 8; // files of steps in memory
const waiting = new Map<string, (value: unknown) => void>();
const cache = new Map<string, Promise<unknown>>();

declare global {
  interface Window {
    headrace: { load(name: string, value: unknown): void };
  }
}

window.headrace = {
  load(name, value) {
    waiting.get(name)?.(value);
    waiting.delete(name);
  },
};

function fromScript(name: string, fresh: boolean): Promise<unknown> {
  return new Promise((resolve, reject) => {
    waiting.set(name, resolve);
    const script = document.createElement("script");
    script.src = `data/${name}.js${fresh ? `?t=${Date.now()}` : ""}`;
    script.onload = () => script.remove();
    script.onerror = () => {
      script.remove();
      waiting.delete(name);
      cache.delete(name);
      reject(new Error(`data/${name}.js cannot be loaded: it is missing, or headrace view has ended.`));
    };
    document.head.append(script);
  });
}

function load<T>(name: string): Promise<T> {
  const found = cache.get(name) ?? fromScript(name, false);
  cache.delete(name);
  cache.set(name, found); // the newest is the last
  for (const old of cache.keys()) {
    if (cache.size <= KEPT) break;
    cache.delete(old);
  }
  return found as Promise<T>;
}

const numbered = (kind: string, step: number) => `${kind}-${String(step).padStart(7, "0")}`;

export const loadOverview = () => fromScript("overview", location.protocol !== "file:") as Promise<Overview>;
export const loadStep = (step: number) => load<StepData>(numbered("step", step));
export const loadTokens = (step: number) => load<TokenData>(numbered("tokens", step));
export const loadEvaluation = (step: number) => load<EvaluationData>(numbered("eval", step));
export const loadUntrained = () => load<UntrainedData>("untrained");
export const loadPrompts = () => load<Prompts>("prompts");

/** What a run that goes on has changed. */
export function forgetGrowing(): void {
  cache.delete("untrained");
  cache.delete("prompts");
}
