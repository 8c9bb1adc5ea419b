// Scales that people who see colours differently can tell apart: blue to orange about zero, one violet for amounts.

export type Scale = { color: (value: number) => string; low: number; high: number; ends: [string, string] };

const BLUE = "47 111 237";
const ORANGE = "222 120 0";
const VIOLET = "134 84 214";
const KINDS = ["47 111 237", "222 120 0", "0 150 120", "204 80 140", "150 140 20", "120 120 130", "120 70 190", "90 170 220", "170 80 50", "60 60 90"];
const MOST = 0.6; // opacity: text stays legible on it

const tint = (rgb: string, share: number) => `rgb(${rgb} / ${(Math.min(1, Math.max(0, share)) * MOST).toFixed(3)})`;

/** The value below which the share of the sizes lies: an outlier does not bleach all others. */
function quantile(values: number[], share: number): number {
  const sorted = values.map(Math.abs).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))] : 0;
}

export function diverging(values: number[]): Scale {
  const bound = quantile(values, 0.98) || 1;
  return { color: (value) => tint(value < 0 ? ORANGE : BLUE, Math.abs(value) / bound), low: -bound, high: bound, ends: [tint(ORANGE, 1), tint(BLUE, 1)] };
}

/** For log-probs: the less probable a token, the darker. */
export function amount(values: number[]): Scale {
  const bound = quantile(values, 0.98) || 1;
  return { color: (value) => tint(VIOLET, -value / bound), low: -bound, high: 0, ends: [tint(VIOLET, 1), tint(VIOLET, 0)] };
}

export const kind = (index: number) => `rgb(${KINDS[index % KINDS.length]} / 0.32)`;

export const stroke = (index: number) => `rgb(${KINDS[index % KINDS.length]})`;

/** Rewards of a group: the lowest of the run is orange, the highest blue. */
export function reward(value: number | null, low: number, high: number): string {
  if (value === null) return "transparent";
  const share = high > low ? (value - low) / (high - low) : 1;
  return share >= 0.5 ? `rgb(${BLUE} / ${(0.25 + (share - 0.5) * 1.5).toFixed(3)})` : `rgb(${ORANGE} / ${(0.25 + (0.5 - share) * 1.5).toFixed(3)})`;
}
