// What a text shares with another one.

export interface Parts {
  start: string; // what both begin with
  middle: string;
  end: string; // what both end with
}

const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;

/** The text in three parts, cut between words. */
export function divide(text: string, reference: string): Parts {
  const [a, b] = [reference.match(WORDS) ?? [], text.match(WORDS) ?? []];
  const most = Math.min(a.length, b.length);
  let start = 0;
  while (start < most && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < most - start && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  const last = b.length - end;
  return { start: b.slice(0, start).join(""), middle: b.slice(start, last).join(""), end: b.slice(last).join("") };
}
