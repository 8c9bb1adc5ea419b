// Plays one party of a run for tests/contract/test_typescript.py: `node dist/test/client.js PARTY ADDRESS WORD...`.
// Prints a line of JSON: what it saw, or the error.
import { column, elements, HeadraceError, open, pack, readSamples, type Services } from "headrace";
import { GroupState, PutOutcome, type GroupLease } from "headrace/buffer";
import { SampleStatus } from "headrace/sample";

type Party = (services: Services, ...words: string[]) => Promise<unknown>;

/** Submits prompts, waits for their groups, reads the samples. */
const submit: Party = async (services, stream = "", ...texts) => {
  const { buffer } = services;
  const prompts = texts.map((text, i) => ({
    promptId: `node-${i}`, content: { case: "text" as const, value: text }, label: String(i),
  }));
  const { groupIds } = await buffer.submitPrompts({ stream, prompts });
  const missing = new Set(groupIds);
  for await (const { events } of buffer.watch({ stream })) {
    for (const { kind, groupId } of events) if (kind === "put") missing.delete(groupId);
    if (missing.size === 0) break;
  }
  const { groups } = await buffer.listGroups({ stream, groupIds });
  const ids = groups.flatMap(({ samples }) => samples.map(({ sampleId }) => sampleId));
  return { states: groups.map(({ state }) => GroupState[state]), samples: await read(services, stream, ...ids) };
};

/** Each column: its length, then its first elements. */
const read = async ({ buffer }: Services, stream = "", ...ids: string[]) => {
  const samples = [];
  for await (const { envelope, payload } of readSamples(buffer, stream, ids))
    samples.push({
      group_id: envelope.groupId,
      reward: envelope.reward,
      policy_version: Number(envelope.policyRanges[0]?.policyVersion),
      columns: Object.fromEntries(
        payload.columns.map(elements).map((each, i) => [
          payload.columns[i]!.name, [each.length, ...Array.from(each.slice(0, 8), Number)],
        ]),
      ),
    });
  return samples;
};

/** Leases one group, renews its lease, puts its samples. */
const produce: Party = async ({ buffer }, stream = "") => {
  const { leases: [lease] } = await buffer.leaseGroups({ stream, producerId: "node", maxGroups: 1, waitSeconds: 10 });
  if (lease === undefined) throw new Error("nothing to lease");
  const { renewed } = await buffer.renewLeases({ leaseIds: [lease.leaseId] });
  const samples = Array.from({ length: lease.nSamples }, (_, index) => sample(lease, index));
  const { leaseId, groupId } = lease;
  const { results } = await buffer.putGroups({ groups: [{ leaseId, groupId, outcome: PutOutcome.COMPLETE, samples }] });
  const ready = (await buffer.getStats({ stream })).streams[0]?.groups["READY"];
  return { renewed: renewed.length, refused: results[0]?.refused ?? null, ready: Number(ready) };
};

const sample = (lease: GroupLease, index: number) =>
  pack(
    {
      sampleId: `${lease.leaseId}/${index}`, groupId: lease.groupId, index, status: SampleStatus.COMPLETED, reward: 1,
      policyRanges: [{ policyVersion: lease.policyVersion, start: 0, end: 2 }],
    },
    {
      prompt: "3 + 4 =", response: "7",
      columns: [
        column("tokens", Int32Array.of(1, 2, 3, 10 + index, 5)),
        column("loss_mask", Uint8Array.of(1, 0)),
        column("rollout_log_probs", Float32Array.of(-0.5, 0)),
      ],
    },
  );

const score: Party = async ({ reward }, label = "", ...responses) => {
  const items = responses.map((response, i) => ({ itemId: String(i), prompt: "3 + 4 =", response, label }));
  const { results } = await reward.score({ items });
  return results.map(({ result }) => (result.case === "score" ? result.value.value : result.value?.reason));
};

const streams: Party = async ({ buffer }, seconds = "60") =>
  (await buffer.listStreams({}, { timeoutMs: 1000 * Number(seconds) })).streams.map(({ name }) => name);

const [party = "", address = "", ...words] = process.argv.slice(2);
try {
  const services = open(address);
  console.log(JSON.stringify(await { submit, read, produce, score, streams }[party]!(services, ...words)));
} catch (error) {
  const { name, message } = error as Error;
  const { status, reason } = error instanceof HeadraceError ? error : { status: null, reason: null };
  console.log(JSON.stringify({ name, message, status, reason }));
  process.exitCode = 1;
}
