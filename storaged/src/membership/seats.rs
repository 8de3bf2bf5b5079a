//! Groups from epoch to epoch. Who is in which group is remembered in the roster once it does not follow from the places alone: each
//! epoch's groups follow from those of the one before, so that a place that comes or goes changes the group of few others. What is in
//! another group than before is coded whole once, instead of as a difference.
//!
//! Whoever proposes an epoch makes its groups, by its own `[coding]`; whoever reads it makes them of what the record says and finds the
//! same ones.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use storaged_plan::{Group, Member, Position, Seat, groups, regrouped, seats};
use storaged_wire::{Geometry, NodeName};

use super::cordon::Cordoning;
use super::roster::Roster;

/// Group and block, as pairs of numbers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SeatRecord {
    data: Option<[u32; 2]>,
    coding: Vec<[u32; 2]>,
}

impl SeatRecord {
    pub fn of(seat: &Seat) -> Self {
        let pair = |at: &Position| [at.group, at.index];
        Self {
            data: seat.data.as_ref().map(pair),
            coding: seat.coding.iter().map(pair).collect(),
        }
    }

    pub fn seat(self) -> Seat {
        let position = |[group, index]: [u32; 2]| Position { group, index };
        Seat {
            data: self.data.map(position),
            coding: self.coding.into_iter().map(position).collect(),
        }
    }
}

impl Roster {
    /// With groups that follow from those of the epoch before. Without a geometry nothing is coded, and nothing remembered.
    #[must_use]
    pub fn seated_after(mut self, before: &Self, geometry: Option<Geometry>) -> Self {
        let Some(geometry) = geometry else {
            return self;
        };
        // Nothing was coded before: there are no groups to keep.
        let Ok(old) = groups(&before.members(), geometry) else {
            return self;
        };
        let is_same = self.members_without_seats() == before.members_without_seats();
        if !is_same {
            self.sit(seats(&old));
            self.stand_up_beside_their_domain(before, &old);
        }
        let Ok(now) = groups(&self.members(), geometry) else {
            return self;
        };
        if !is_same {
            let anew = groups(&self.members_without_seats(), geometry);
            let needs_seats = anew.as_ref() != Ok(&now);
            self.sit(if needs_seats {
                seats(&now)
            } else {
                BTreeMap::new()
            });
        }
        self.regrouped = regrouped(&old, &now);
        if self.regrouped > 0 {
            let (moved, all) = (self.regrouped, self.places.len());
            let told = format!("; {moved} of {all} places are coded in other groups than before");
            self.change.push_str(&told);
        }
        self
    }

    /// With groups made anew of the places alone, where they are not so already: after nodes have got failure domains, or many changes that
    /// kept seats for what that spares.
    pub fn grouped_anew(&self, geometry: Geometry) -> Cordoning {
        let anew = groups(&self.members_without_seats(), geometry);
        if anew == groups(&self.members(), geometry) || anew.is_err() {
            return Cordoning::Already;
        }
        let mut next = self.next("the groups were made anew".into());
        next.sit(BTreeMap::new());
        Cordoning::Propose(Box::new(next))
    }

    /// How many places would be in other groups if so many more came, each in a failure domain of its own.
    pub fn regrouped_by(&self, more: usize, geometry: Geometry) -> Option<usize> {
        let before = groups(&self.members(), geometry).ok()?;
        let mut now = self.clone();
        now.sit(seats(&before));
        let mut members = now.members();
        for number in 0..more {
            let name = NodeName::new(format!("new.{number}")).ok()?;
            members.push(Member {
                failure_domain: name.to_string(),
                name,
                cordon: storaged_plan::Cordon::Open,
                seat: None,
            });
        }
        let after = groups(&members, geometry).ok()?;
        Some(regrouped(&before, &after))
    }

    fn sit(&mut self, mut seats: BTreeMap<NodeName, Seat>) {
        for place in &mut self.places {
            place.seat = seats.remove(&place.name);
        }
    }

    /// What groups that are made anew are made of.
    pub fn members_without_seats(&self) -> Vec<Member> {
        let mut members = self.members();
        members.iter_mut().for_each(|member| member.seat = None);
        members
    }

    /// A place whose node is in another failure domain than the last one, which another place of its group is in: it should have a
    /// seat in another group.
    fn stand_up_beside_their_domain(&mut self, before: &Self, groups: &[Group]) {
        let domain = |members: &[Member]| -> BTreeMap<NodeName, String> {
            let each = members.iter();
            each.map(|it| (it.name.clone(), it.failure_domain.clone()))
                .collect()
        };
        let (old, now) = (domain(&before.members()), domain(&self.members()));
        for place in &mut self.places {
            let own = now.get(&place.name);
            let group = groups.iter().find(|group| group.data.contains(&place.name));
            let others = group.into_iter().flat_map(|group| &group.data);
            let mut others = others.filter(|it| **it != place.name);
            let is_elsewhere = old.get(&place.name).is_some_and(|it| Some(it) != own);
            if let Some(seat) = &mut place.seat
                && is_elsewhere
                && others.any(|it| now.get(it) == own)
            {
                seat.data = None;
            }
        }
    }
}
