// What headrace/view/data.py writes. Texts of a model are hostile: they become text nodes and nothing else.

export type Numbers = (number | null)[];

export interface Columns {
  step: number[];
  columns: Record<string, Numbers>;
}

export interface Ledger {
  source: string; // "metrics", or where the counts are from
  time: number | null;
  states: Record<string, number> | null; // groups by state
  failures: [string, number][];
  filtered: [string, number][];
  staleness: [number, number][] | null; // steps behind, share of the samples
  produced: number | null;
}

export interface Overview {
  version: number;
  headrace: string;
  run: string;
  folder: string;
  made: number; // seconds since 1970
  live: boolean;
  state: { phase: string | null; step: number | null; num_rollout: number | null };
  job: [string, string][];
  metrics: Columns;
  evaluations: Columns;
  marks: [number, string][];
  warnings: [number, string][];
  steps: { step: number[]; samples: Numbers; groups: Numbers; tokens: number[] };
  evals: number[];
  traced: boolean;
  untrained: { failed: number; filtered: number };
  ledger: Ledger;
  tokenizer: { error: string | null };
  notes: string[];
}

export interface Turn {
  role: string;
  content: string;
}

export interface Sample {
  id: string;
  index: number;
  status: string;
  reward: number | null;
  parts: Record<string, number | null>;
  advantage: number | null;
  gap: number | null; // nats
  scorer: string | null;
  scorer_version: string | null;
  prompt_tokens: number;
  response_tokens: number;
  trained_tokens: number;
  ranges: [number, number, number][]; // policy version, start, end in the response
  response: string;
  turns: Turn[];
  metadata: Record<string, unknown> | null;
  failure: [string, string] | null;
  dropped: string | null;
  has_tokens: boolean;
}

export interface Group {
  id: string;
  prompt: string;
  label: string | null;
  set: string | null; // of an evaluation
  version?: number | null;
  samples: Sample[];
}

/** Of a step, of an evaluation, or all that were not trained. */
export interface Groups {
  groups: Group[];
}

export interface Prompts {
  texts: string[];
  at: [number, number, number | null][][]; // step, number of the group, mean reward
}

export interface SampleTokens {
  t: number[]; // indices into texts and ids
  n: number; // tokens of the prompt
  mask: number[];
  engine: Numbers;
  trainer: Numbers;
  advantage: Numbers;
}

export interface TokensData {
  step: number;
  texts: string[] | null;
  ids: number[];
  samples: Record<string, SampleTokens>;
}

/** Index of the lane, name, begin and end in seconds since 1970, error. A parent comes before its children. */
export type TraceSpan = [lane: number, name: string, begun: number, ended: number, error: string];

export interface TraceData {
  lanes: string[];
  samples: Record<string, TraceSpan[]>;
}

/** The name of a step's file, as `tokens-0000009`. */
export function fileOf(kind: "step" | "tokens" | "eval" | "trace", step: number): string {
  return `${kind}-${String(step).padStart(7, "0")}`;
}
