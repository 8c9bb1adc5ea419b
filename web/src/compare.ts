// What a text shares with another one.

export interface Piece {
  text: string;
  kind: "start" | "same" | "new"; // the start is what both begin with
}

const MOST_EDITS = 160;
const MOST_NEW = 0.4; // share of the words after the start
const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;

/** The text in pieces. Where it differs too much for marks to help, only the first other word is marked. */
export function compare(text: string, reference: string): Piece[] {
  const [a, b] = [reference.match(WORDS) ?? [], text.match(WORDS) ?? []];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const kept = keptWords(a.slice(start, a.length - end), b.slice(start, b.length - end));
  const middle = b.length - end - start;
  const isMarked = kept !== null && middle - kept.size <= MOST_NEW * (b.length - start);
  const pieces: Piece[] = [];
  b.forEach((word, index) => {
    const isNew = isMarked ? index >= start && index < start + middle && !kept.has(index - start) : index === start;
    const kind = index < start ? "start" : isNew ? "new" : "same";
    const last = pieces.at(-1);
    if (last?.kind === kind) last.text += word;
    else pieces.push({ text: word, kind });
  });
  return pieces;
}

/** Indices of b's words that are in a, by the shortest edit (Myers 1986). */
function keptWords(a: string[], b: string[]): Set<number> | null {
  const most = Math.min(MOST_EDITS, a.length + b.length);
  const furthest = new Int32Array(2 * most + 3);
  const trace: Int32Array[] = [];
  for (let edits = 0; edits <= most; edits++) {
    trace.push(furthest.slice());
    for (let k = -edits; k <= edits; k += 2) {
      const down = k === -edits || (k !== edits && furthest[most + k]! < furthest[most + k + 2]!);
      let x = down ? furthest[most + k + 2]! : furthest[most + k]! + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x += 1;
      furthest[most + k + 1] = x;
      if (x >= a.length && x - k >= b.length) return walkBack(trace, edits, a.length, b.length, most);
    }
  }
  return null;
}

function walkBack(trace: Int32Array[], edits: number, aLength: number, bLength: number, most: number): Set<number> {
  const kept = new Set<number>();
  let [x, y] = [aLength, bLength];
  for (; edits >= 0; edits--) {
    const furthest = trace[edits]!;
    const k = x - y;
    const down = k === -edits || (k !== edits && furthest[most + k]! < furthest[most + k + 2]!);
    const fromX = edits === 0 ? 0 : furthest[most + 1 + (down ? k + 1 : k - 1)]!;
    const fromY = edits === 0 ? 0 : fromX - (down ? k + 1 : k - 1);
    while (x > fromX && y > fromY) {
      x -= 1;
      y -= 1;
      kept.add(y);
    }
    [x, y] = [fromX, fromY];
  }
  return kept;
}
