// A foreign client, made from protos/ alone: submits prompts, waits for their groups, reads the samples' tokens.
//
//   node client.js ADDRESS PROTOS_FOLDER STREAM PROMPT...
//
// Prints one JSON line: the groups, and for each sample its reward, policy version and tokens.
"use strict";
const path = require("path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, protos, stream, ...prompts] = process.argv.slice(2);
const definition = loader.loadSync(path.join(protos, "headrace/api/buffer/v1/buffer.proto"), {
  includeDirs: [protos],
  keepCase: true,
  longs: Number,
  enums: String,
  defaults: true,
});
const payloadType = definition["headrace.api.sample.v1.SamplePayload"];
const api = grpc.loadPackageDefinition(definition).headrace.api.buffer.v1;
const buffer = new api.BufferService(address, grpc.credentials.createInsecure());

const deadline = () => ({ deadline: Date.now() + 30_000 });
const call = (method, request) =>
  new Promise((resolve, reject) =>
    buffer[method](request, deadline(), (error, reply) => (error ? reject(error) : resolve(reply))),
  );

// Resolves once every one of the groups was put.
function waitForGroups(groupIds) {
  const missing = new Set(groupIds);
  return new Promise((resolve, reject) => {
    const events = buffer.Watch({ stream, from_position: 0 }, deadline());
    events.on("error", (error) => missing.size && reject(error));
    events.on("data", (reply) => {
      reply.events.filter((event) => event.kind === "put").forEach((event) => missing.delete(event.group_id));
      if (missing.size === 0) {
        events.cancel();
        resolve();
      }
    });
  });
}

function fetchSamples(sampleIds) {
  return new Promise((resolve, reject) => {
    const samples = [];
    const replies = buffer.FetchSamples({ stream, sample_ids: sampleIds }, deadline());
    replies.on("error", reject);
    replies.on("data", (reply) => samples.push(...reply.samples));
    replies.on("end", () => resolve(samples));
  });
}

// Columns are raw little-endian arrays; tokens are int32.
function tokensOf(sample) {
  const payload = payloadType.deserialize(sample.payload);
  const column = payload.columns.find((candidate) => candidate.name === "tokens");
  return Array.from({ length: column.data.length / 4 }, (_, i) => column.data.readInt32LE(4 * i));
}

async function main() {
  const submitted = await call("SubmitPrompts", {
    stream,
    prompts: prompts.map((text, i) => ({ prompt_id: `node-${i}`, text, label: String(i) })),
  });
  await waitForGroups(submitted.group_ids);
  const { groups } = await call("ListGroups", { stream, group_ids: submitted.group_ids });
  const samples = await fetchSamples(groups.flatMap((group) => group.samples.map((envelope) => envelope.sample_id)));
  const seen = samples.map((sample) => ({
    group_id: sample.envelope.group_id,
    reward: sample.envelope.reward,
    policy_version: sample.envelope.policy_ranges[0].policy_version,
    tokens: tokensOf(sample),
  }));
  console.log(JSON.stringify({ states: groups.map((group) => group.state), samples: seen }));
  buffer.close();
}

main().catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
