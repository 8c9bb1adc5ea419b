import { readFileSync } from "node:fs";
import { open } from "headrace";

const address = JSON.parse(readFileSync("runs/run/services.json", "utf8"));
const { buffer } = open(address.buffer.address);
const prompt = { promptId: "sum-1", content: { case: "text" as const, value: "3 + 4 =" }, label: "7" };
await buffer.submitPrompts({ stream: "train", prompts: [prompt] });
console.log((await buffer.getStats({ stream: "train" })).streams[0]?.groups);
