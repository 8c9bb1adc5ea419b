// Samples: columns of little-endian arrays, packed by a producer and opened by a reader.
import { createHash } from "node:crypto";
import { create, fromBinary, toBinary, type MessageInitShape } from "@bufbuild/protobuf";
import type { BufferService } from "../api/headrace/api/buffer/v1/buffer_pb.js";
import * as pb from "../api/headrace/api/sample/v1/sample_pb.js";
import type { Client } from "@connectrpc/connect";
import { HeadraceError } from "./calls.js";

const TYPES = {
  [pb.Dtype.UINT8]: Uint8Array,
  [pb.Dtype.INT16]: Int16Array,
  [pb.Dtype.INT32]: Int32Array,
  [pb.Dtype.INT64]: BigInt64Array,
  [pb.Dtype.FLOAT32]: Float32Array,
  [pb.Dtype.FLOAT64]: Float64Array,
} as const;

/** A column's elements; JavaScript has no array of bfloat16. */
export type Elements = InstanceType<(typeof TYPES)[keyof typeof TYPES]>;

/** `shape` defaults to one dimension. */
export function column(name: string, of: Elements, shape: readonly number[] = [of.length]): pb.Column {
  const dtype = Number(Object.entries(TYPES).find(([, type]) => of instanceof type)![0]) as pb.Dtype;
  const data = new Uint8Array(of.buffer, of.byteOffset, of.byteLength);
  return create(pb.ColumnSchema, { name, dtype, shape: shape.map(BigInt), data });
}

/** Throws a RangeError for bfloat16. */
export function elements(of: pb.Column): Elements {
  const type = TYPES[of.dtype as keyof typeof TYPES];
  if (type === undefined) throw new RangeError(`column ${of.name} has dtype ${pb.Dtype[of.dtype]}: read its data`);
  return new type(of.data.slice().buffer);
}

/** A sample to put. Lengths, digest and a `rolloutId` that is missing follow from the payload and `sampleId`. */
export function pack(
  envelope: MessageInitShape<typeof pb.SampleEnvelopeSchema>,
  payload: MessageInitShape<typeof pb.SamplePayloadSchema>,
): pb.Sample {
  const whole = create(pb.SamplePayloadSchema, payload), bytes = toBinary(pb.SamplePayloadSchema, whole);
  const mask = whole.columns.find(({ name }) => name === "loss_mask")?.data ?? new Uint8Array();
  const tokens = (whole.columns.find(({ name }) => name === "tokens")?.data.length ?? 0) / 4;
  const lengths = { promptTokens: tokens - mask.length, responseTokens: mask.length, trainedTokens: mask.filter(Boolean).length };
  const digest = createHash("sha256").update(bytes).digest();
  const sealed = { ...lengths, rolloutId: envelope.sampleId ?? "", ...envelope, digest, payloadBytes: BigInt(bytes.length) };
  return create(pb.SampleSchema, { envelope: sealed, payload: bytes });
}

/** Samples in the order of their ids, with large columns. Throws HeadraceError, DATA_LOSS for a changed column. */
export async function* readSamples(
  buffer: Client<typeof BufferService>,
  stream: string,
  sampleIds: string[],
): AsyncGenerator<{ envelope: pb.SampleEnvelope; payload: pb.SamplePayload }> {
  for await (const reply of buffer.fetchSamples({ stream, sampleIds })) {
    for (const sample of reply.samples) {
      const envelope = sample.envelope!, payload = fromBinary(pb.SamplePayloadSchema, sample.payload);
      for (const { name, sha256 } of envelope.outOfLine) {
        const pieces: Uint8Array[] = [];
        for await (const piece of buffer.fetchColumn({ sha256 })) pieces.push(piece.data);
        const data = Buffer.concat(pieces);
        if (!createHash("sha256").update(data).digest().equals(sha256))
          throw new HeadraceError(`column ${name} of ${envelope.sampleId} does not match its SHA-256`, "DATA_LOSS");
        payload.columns.find((each) => each.name === name)!.data = data;
      }
      yield { envelope, payload };
    }
  }
}
