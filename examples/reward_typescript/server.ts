// A reward service of one's own in TypeScript. `npm run build` compiles it; `node server.js 127.0.0.1:7010` serves.
import { serveReward, type Item } from "headrace";

/** 1 for the right number, less the farther a number is from it, 0 without a number. */
function closeness({ response, label }: Item): number {
  if (label === undefined) throw new Error("there is no label");
  const said = /^\s*-?\d+\s*$/.test(response) ? Number(response) : NaN;
  return Number.isNaN(said) ? 0 : 1 / (1 + Math.abs(said - Number(label)));
}

const scorer = { name: "close", version: "1", description: "How close the number is.", score: closeness };
const { address } = await serveReward(process.argv[2] ?? "127.0.0.1:7010", scorer);
console.log(`close listens on ${address}`);
